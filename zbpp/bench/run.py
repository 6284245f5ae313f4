"""A bench: its start, and one process's share of it.

1. Every contender runs one step without optimizer; its gradients are compared.
2. Contenders take turns: built, warmed up, timed, closed. One that was slow because
   the machine was is so in one turn; no contender's memory lies beside another's. In
   the last one the jobs are looked at too, of torch's schedules in steps of their own.
3. The process with rank 0 writes and prints.
"""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from zbpp.bench.contender import (
    Contender,
    Field,
    Measured,
    StepBatch,
    autocast_of,
    step_batch,
)
from zbpp.bench.gradients import Gradients, compare, noted, plain_gradients
from zbpp.bench.names import OURS, TORCH, split_name
from zbpp.bench.ours import Ours, Promised, build_ours, resolved
from zbpp.bench.peers import build_peer, has_schedule
from zbpp.bench.request import BenchRequest
from zbpp.bench.results import Outcome, write_results
from zbpp.bench.turns import Turn, take_turn
from zbpp.core import RequestError, Schedule, WorkerError
from zbpp.runtime.comm.process_group import initialise
from zbpp.runtime.support.devices import asked_device, runs_ahead
from zbpp.runtime.support.errors import PeerError
from zbpp.training.launch import is_launched, launch, run_launched

__all__ = ["run_bench", "start_bench"]

_Look = tuple[Measured | None, Promised | None]


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
    results = json.loads((request.out / "results.json").read_text(encoding="utf-8"))
    wrong = [
        f"{contender['name']} ({contender['reason']})"
        for contender in results["contenders"]
        if contender["same_gradients"] is False
    ]
    if wrong:
        raise WorkerError(
            f"not timed, as their gradients are not those of {results['reference']}: "
            f"{', '.join(wrong)}"
        )


def _check_peers(request: BenchRequest) -> None:
    for name in request.contenders:
        if split_name(name)[0] == TORCH and not has_schedule(name):
            raise RequestError(
                f"{name} cannot run: torch {torch.__version__} has no such schedule; "
                "leave it out of --peers"
            )


def run_bench(request: BenchRequest) -> int:
    """Run one process's share.

    Returns:
        The exit code: 1 if the gradients of a contender are wrong.
    """
    device = asked_device("cpu" if request.emulate is not None else request.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as in training: the processes share the cores
    initialise(device, timeout_s=request.timeout_s)
    field = Field(request, device, _batch(request))
    schedules = {
        name: resolved(field, name)
        for name in request.contenders
        if split_name(name)[0] == OURS
    }
    apart = _compared(field, schedules)
    racing = [
        name
        for name, difference in apart.items()
        if difference is None or difference <= request.tolerance
    ]
    turns: dict[str, list[Turn]] = {name: [] for name in racing}
    looks: dict[str, _Look] = {}
    for turn in range(request.rounds if len(racing) else 0):
        for name in racing if turn % 2 == 0 else reversed(racing):
            record, looks[name] = _turn(
                field, name, schedules, looks=turn == request.rounds - 1
            )
            turns[name].append(record)
            _forget(device)
    outcomes = [
        Outcome(name, difference, tuple(turns.get(name, ())), *looks.get(name, ()))
        for name, difference in apart.items()
    ]
    if dist.get_rank() == 0:
        write_results(field, outcomes)
    return int(any(outcome.is_wrong(request.tolerance) for outcome in outcomes))


def _batch(request: BenchRequest) -> StepBatch:
    if request.emulate is not None:
        nothing = [None] * request.microbatches
        return StepBatch(nothing, nothing, request.microbatches, None)
    torch.manual_seed(request.seed)
    return step_batch(request.load(), request.microbatches)


def _compared(field: Field, schedules: dict[str, Schedule]) -> dict[str, float | None]:
    """For each contender how far its gradients are off; None: nothing to compare."""
    request = field.request
    if request.emulate is not None:
        return dict.fromkeys(request.contenders)
    reference: Gradients | None = None
    if request.reference == "plain":
        reference = {}
        if dist.get_rank() == 0:
            dtype = autocast_of(request)
            reference = plain_gradients(
                field.model(), field.batch, field.device, autocast=dtype
            )
            _forget(field.device)
    apart: dict[str, float | None] = {}
    for name in request.contenders:
        gradients = _gradients(field, name, schedules)
        _forget(field.device)
        if reference is None:
            reference = gradients
        apart[name] = compare(reference, gradients)
    return apart


def _gradients(field: Field, name: str, schedules: dict[str, Schedule]) -> Gradients:
    """Gradients of one step of a contender."""
    with _built(field, name, schedules, steps=False) as contender:
        contender.step()
        return noted(contender.gradients())


def _turn(
    field: Field, name: str, schedules: dict[str, Schedule], *, looks: bool
) -> tuple[Turn, _Look]:
    """One turn of a contender, and a look at its jobs, if that is asked for."""
    request = field.request
    with _built(field, name, schedules, steps=True) as contender:
        turn = take_turn(
            contender,
            field.device,
            warmup=request.warmup,
            steps=request.steps_a_turn,
        )
        if not looks:
            return turn, (None, None)
        n = request.steps_a_turn
        promised = contender.promised(n) if isinstance(contender, Ours) else None
        return turn, (contender.measured(n), promised)


def _forget(device: torch.device) -> None:
    """Give back the memory of a contender that nobody refers to any more."""
    gc.collect()
    if runs_ahead(device):
        torch.accelerator.empty_cache()


@contextmanager
def _built(
    field: Field, name: str, schedules: dict[str, Schedule], *, steps: bool
) -> Iterator[Contender]:
    """Build a contender, and close it."""
    ours = split_name(name)[0] == OURS
    try:
        contender: Contender = (
            build_ours(field, schedules[name], steps=steps)
            if ours
            else build_peer(field, name, steps=steps)
        )
        yield contender
        contender.close()
    except (RequestError, PeerError) as error:
        if isinstance(error, PeerError) or str(error).startswith(name):
            raise
        raise RequestError(f"{name} cannot run: {error}") from error
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        if ours or steps:  # a peer's first step shows what it cannot do
            raise
        raise RequestError(
            f"{name} cannot run this model: torch says: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else error!r}; leave it out of "
            "--peers"
        ) from error
