"""Start a training: in processes of our own, in torchrun's, or in this one."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace

import torch.distributed as dist

from zbpp.core import RequestError, Schedule, WorkerError
from zbpp.training.emulated import run_emulated
from zbpp.training.launch import fail, launch, leave_with_parent
from zbpp.training.loop import train
from zbpp.training.options import Train
from zbpp.training.resume import resumed
from zbpp.training.setup import check, schedule_of

__all__ = ["Worker", "start", "start_worker"]

Worker = Callable[[Train, Schedule], int | None]
"""Gives the exit code, if it is not 0."""

_STEPS = 200
_EMULATED_STEPS = 10


def start(options: Train) -> None:
    """Train, and return when it is done.

    Raises:
        RequestError: the request is wrong or cannot be met.
        WorkerError: a process failed.
    """
    emulated = options.emulate is not None
    worker = run_emulated if emulated else train
    if options.steps is None:
        options = replace(options, steps=_EMULATED_STEPS if emulated else _STEPS)
    start_worker(worker, options, check=None if emulated else check)


def start_worker(
    worker: Worker, options: Train, *, check: Callable[[Train, Schedule], None] | None
) -> None:
    """Run a worker on every rank: in torchrun's processes, in new ones, or here.

    Args:
        worker: called with the options and the schedule; can be pickled.
        options: of the run.
        check: called before any process is started, with the same.

    Raises:
        RequestError: the request is wrong or cannot be met.
        WorkerError: a process failed.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _join(worker, options)
        return
    schedule = schedule_of(options)
    if check is not None:
        check(options, schedule)
    if schedule.n_stages * options.n_peers == 1 or options.transport == "local":
        code = worker(options, schedule)
        if code:
            raise SystemExit(code)
    else:
        _launch(worker, options, schedule)


def _launch(worker: Worker, options: Train, schedule: Schedule) -> None:
    """Run in processes of our own, and start them again as often as was asked for."""
    device = "cpu" if options.emulate is not None else options.device
    for left in reversed(range(options.max_restarts + 1)):
        try:
            launch(
                worker,
                (options, schedule),
                schedule.n_stages * options.n_peers,
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


def _join(worker: Worker, options: Train) -> None:
    """Be one of torchrun's processes; a failure ends this process."""
    leave_with_parent()
    try:
        options = _for_world(options, int(os.environ["WORLD_SIZE"]))
        code = worker(options, schedule_of(options)) or 0
        if dist.is_initialized():
            dist.barrier()
    except BaseException as error:
        fail(error, rank=int(os.environ["RANK"]))
    print(end="", flush=True)
    os._exit(code)  # an orderly end has been seen to abort in torch's own threads


def _for_world(options: Train, n_processes: int) -> Train:
    """The same with one stage of one replica a process.

    Raises:
        RequestError: another number of stages is asked for, or replicas do not fit.
    """
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
