"""Start a training: in processes of our own, in torchrun's, or in this one."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from zbpp.core import RequestError
from zbpp.planning import Plan
from zbpp.training.launch import is_launched, launch, run_launched
from zbpp.training.loop import train
from zbpp.training.options import TrainOptions
from zbpp.training.setup import check, plan_of

__all__ = ["Worker", "start", "start_worker"]

Worker = Callable[[TrainOptions, Plan], int | None]
"""Gives the exit code, if it is not 0."""

_GRACE_S, _SAVING_GRACE_S = 10, 60
"""Seconds that processes have to end after a signal, and to save before that."""


def start(options: TrainOptions, words: Sequence[str]) -> None:
    """TrainOptions, and return when it is done."""
    start_worker(train, options, words, check=check)


def start_worker(
    worker: Worker,
    options: TrainOptions,
    words: Sequence[str],
    *,
    check: Callable[[TrainOptions, Plan], None],
) -> None:
    """Run a worker on every rank: in torchrun's processes, in new ones, or here.

    Args:
        worker: called with the options and the plan.
        options: of the run.
        words: the command line that asks for it, for new processes.
        check: called before any process is started, with the same.
    """
    if is_launched():
        run_launched(partial(_share, worker, options))
    plan = plan_of(options)
    check(options, plan)
    n = plan.schedule.n_stages
    if n > 1:
        grace_s = _SAVING_GRACE_S if options.save_dir is not None else _GRACE_S
        launch(words, n, grace_s=grace_s)
    elif code := worker(options, plan):
        raise SystemExit(code)


def _share(worker: Worker, options: TrainOptions) -> int | None:
    """The share of one of torchrun's processes, one for each stage."""
    n = int(os.environ["WORLD_SIZE"])
    if options.stages not in (None, n):
        raise RequestError(
            f"--stages is {options.stages}, but torchrun has started {n} processes; "
            "leave --stages out"
        )
    options = replace(options, stages=n)
    return worker(options, plan_of(options))
