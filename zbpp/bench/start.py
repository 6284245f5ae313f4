"""Start a bench: as one of torchrun's processes, or in new ones."""

import json
from functools import partial

from zbpp.bench.names import TORCH, split_name
from zbpp.bench.peers import has_schedule
from zbpp.bench.request import BenchRequest
from zbpp.bench.run import run_bench
from zbpp.core import RequestError, WorkerError
from zbpp.training.launch import is_launched, launch, run_launched

__all__ = ["start_bench"]


def start_bench(request: BenchRequest) -> None:
    """Run a bench, and return when it is done.

    Raises:
        RequestError: the request is wrong, or a contender cannot run.
        WorkerError: a process failed, or the gradients of a contender are wrong.
    """
    _check_peers(request)
    if is_launched():
        run_launched(partial(run_bench, request))
    device = "cpu" if request.emulate is not None else request.device
    launch(
        run_bench,
        (request,),
        request.stages,
        device=device,
        timeout_s=request.timeout_s,
    )
    found = json.loads((request.out / "results.json").read_text(encoding="utf-8"))
    wrong = [
        f"{one['name']} ({one['reason']})"
        for one in found["contenders"]
        if one["same_gradients"] is False
    ]
    if wrong:
        raise WorkerError(
            f"not timed, as their gradients are not those of {found['reference']}: "
            f"{', '.join(wrong)}"
        )


def _check_peers(request: BenchRequest) -> None:
    for name in request.contenders:
        if split_name(name)[0] == TORCH and not has_schedule(name):
            import torch

            raise RequestError(
                f"{name} cannot run: torch {torch.__version__} has no such schedule; "
                "leave it out of --peers"
            )
