"""Start a training: in processes of our own, in torchrun's, or in this one."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from zbpp.core import RequestError, WorkerError, recomputed
from zbpp.emulation.run import emulate
from zbpp.planning import Plan
from zbpp.training.launch import is_launched, launch, run_launched
from zbpp.training.loop import train
from zbpp.training.options import Train
from zbpp.training.resume import resumed
from zbpp.training.setup import check, costs_of, plan_of, sleeping_layers

__all__ = ["Worker", "start", "start_worker"]

Worker = Callable[[Train, Plan], int | None]
"""Gives the exit code, if it is not 0."""

_STEPS = 200
_EMULATED_STEPS = 10


def start(options: Train) -> None:
    """Train, and return when it is done."""
    emulated = options.emulate is not None
    worker = _run_emulated if emulated else train
    if options.steps is None:
        options = replace(options, steps=_EMULATED_STEPS if emulated else _STEPS)
    start_worker(worker, options, check=None if emulated else check)


def start_worker(
    worker: Worker, options: Train, *, check: Callable[[Train, Plan], None] | None
) -> None:
    """Run a worker on every rank: in torchrun's processes, in new ones, or here.

    Args:
        worker: called with the options and the plan; can be pickled.
        options: of the run.
        check: called before any process is started, with the same.
    """
    if is_launched():
        run_launched(partial(_share, worker, options))
    plan = plan_of(options)
    if check is not None:
        check(options, plan)
    if plan.schedule.n_stages * options.n_peers == 1 or options.transport == "local":
        code = worker(options, plan)
        if code:
            raise SystemExit(code)
    else:
        _launch(worker, options, plan)


def _launch(worker: Worker, options: Train, plan: Plan) -> None:
    """Run in processes of our own, and start them again as often as was asked for."""
    device = "cpu" if options.emulate is not None else options.device
    for left in reversed(range(options.max_restarts + 1)):
        try:
            launch(
                worker,
                (options, plan),
                plan.schedule.n_stages * options.n_peers,
                device=device,
                timeout_s=options.timeout_s,
                stops_itself=options.save_dir is not None,
            )
            return
        except WorkerError as error:
            if left == 0:
                raise
            print(f"zbpp: {error}; starting again", file=sys.stderr, flush=True)
            options = resumed(options)


def _share(worker: Worker, options: Train) -> int | None:
    """The share of one of torchrun's processes."""
    options = _for_world(options, int(os.environ["WORLD_SIZE"]))
    return worker(options, plan_of(options))


def _for_world(options: Train, n_processes: int) -> Train:
    """Return options with one stage of one replica a process."""
    n_stages, rest = divmod(n_processes, options.n_peers)
    if rest:
        raise RequestError(
            f"--data_parallel is {options.data_parallel} and --tensor_parallel "
            f"{options.tensor_parallel}, but torchrun has started {n_processes} "
            f"processes; start a multiple of {options.n_peers}"
        )
    if options.stages not in (None, n_stages):
        raise RequestError(
            f"--stages is {options.stages}, but torchrun has started {n_processes} "
            f"processes, {options.n_peers} for each; leave --stages out"
        )
    return replace(options, stages=n_stages)


def _run_emulated(options: Train, plan: Plan) -> None:
    """Run one process's share of ``zbpp train --emulate``; rank 0 prints the outcome.

    One step at a time, unless a flag asks for post-validation or a barrier. With
    ``--metrics``, the outcome is also written as one JSON line.
    """
    layers = sleeping_layers(options)
    outcome = emulate(
        plan.schedule,
        None if layers else recomputed(costs_of(options), plan.schedule),
        layers=layers,
        n_steps=options.steps or 1,
        timeout_s=options.timeout_s,
        post_validation=options.enable_optimizer_post_validation,
    )
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    print(outcome, flush=True)
    if options.metrics is not None:
        options.metrics.write_text(json.dumps(outcome.as_dict()) + "\n")
