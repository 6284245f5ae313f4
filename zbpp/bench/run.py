"""A bench: its start, and one process's share of it.

Contenders take turns: built, warmed up, timed, closed. So a slow spell of the machine
hits all of them, and the memory of one does not lie beside another's. In the first turn
the loss and the gradient norm of a contender's first step must be those of the first
contender; else it is not timed. In the last turn the jobs of ours are read too.
"""

import gc
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from zbpp.bench.contender import (
    Contender,
    Setting,
    StepBatch,
    seeded_model,
    step_batch,
)
from zbpp.bench.names import OURS, TORCH, split_name
from zbpp.bench.ours import Jobs, Ours, resolved
from zbpp.bench.request import BenchOptions, BenchPlan, planned
from zbpp.bench.results import Outcome, write_results
from zbpp.bench.torchs import TorchSchedule, check_torch
from zbpp.bench.turns import Turn, take_turn
from zbpp.core import RequestError, Schedule
from zbpp.runtime.comm.process_group import initialise
from zbpp.runtime.support.devices import asked_device, runs_ahead
from zbpp.runtime.support.errors import PeerError
from zbpp.training.launch import start

__all__ = ["difference", "run_bench", "start_bench"]

_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}
"""Largest relative difference of losses and of gradient norms, by dtype."""
_TIMEOUT_S = 600.0


def start_bench(options: BenchOptions, words: Sequence[str]) -> None:
    """Run a bench, and return when it is done.

    Raises:
        RequestError: the request is wrong, or a contender cannot run.
        WorkerError: a process was killed.
    """
    start(run_bench, options, words, plan=partial(_checked_plan, words))


def _checked_plan(words: Sequence[str], options: BenchOptions) -> BenchPlan:
    plan = planned(words, options)
    for name in plan.schedules:
        if split_name(name)[0] == TORCH:
            check_torch(name)
    return plan


def run_bench(options: BenchOptions, plan: BenchPlan) -> int:
    """Run one process's share.

    Returns:
        The exit code: 1 if a contender computes something else than the first.
    """
    sleeps = plan.costs is not None
    device = asked_device("cpu" if sleeps else options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # as in training: the processes share the cores
    initialise(device, timeout_s=_TIMEOUT_S)
    nothing = [None] * options.microbatches
    batch = StepBatch(nothing, nothing, options.microbatches, None)
    if not sleeps:
        batch = step_batch(seeded_model(options), options.microbatches)
    setting = Setting(options, plan, device, batch)
    schedules = {
        name: resolved(setting, name)
        for name in plan.schedules
        if split_name(name)[0] == OURS
    }
    reasons = dict.fromkeys(plan.schedules, "")
    turns: dict[str, list[Turn]] = {name: [] for name in plan.schedules}
    jobs: dict[str, Jobs] = {}
    first: tuple[float, float] | None = None
    for turn in range(options.rounds):
        racing = [name for name, reason in reasons.items() if not reason]
        for name in racing if turn % 2 == 0 else reversed(racing):
            with _built(setting, name, schedules) as contender:
                if turn == 0 and not sleeps:
                    with _refusals(name):
                        step = contender.compared_step()
                    first = first or step
                    reasons[name] = difference(first, step, _TOLERANCE[options.dtype])
                if not reasons[name]:
                    turns[name].append(take_turn(contender, setting))
                    if turn == options.rounds - 1 and isinstance(contender, Ours):
                        mode = split_name(name)[1]
                        jobs[name] = contender.jobs(mode, options.steps_a_turn)
            del contender
            gc.collect()
            if runs_ahead(device):
                torch.accelerator.empty_cache()
    wrong = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
    if dist.get_rank() == 0:
        outcomes = [
            Outcome(name, reason, tuple(turns[name]), jobs.get(name))
            for name, reason in reasons.items()
        ]
        write_results(setting, outcomes)
        if wrong:
            print(f"zbpp: not timed: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def difference(
    first: tuple[float, float], step: tuple[float, float], tolerance: float
) -> str:
    """Text about what is wrong with a step's loss and gradient norm; empty: nothing.

    >>> difference((2.0, 1.0), (2.0, 1.001), 1e-5)
    'refused: gradient norm 1.001, not 1'
    """
    for name, wanted, found in zip(("loss", "gradient norm"), first, step, strict=True):
        if not math.isclose(wanted, found, rel_tol=tolerance):  # NaN is not
            return f"refused: {name} {found:.8g}, not {wanted:.8g}"
    return ""


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Within this, errors say which contender cannot run.

    What torch raises before and in its first step is what it cannot do with the model.
    """
    try:
        yield
    except PeerError:
        raise
    except RequestError as error:
        if str(error).startswith(name):
            raise
        raise RequestError(f"{name} cannot run: {error}") from error
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        if split_name(name)[0] == OURS:
            raise
        text = (str(error) or repr(error)).splitlines()[0]
        raise RequestError(
            f"{name} cannot run this model: torch says: {type(error).__name__}: "
            f"{text}; leave it out of --peers"
        ) from error


@contextmanager
def _built(
    setting: Setting, name: str, schedules: dict[str, Schedule]
) -> Iterator[Contender]:
    """Build a contender, and close it."""
    with _refusals(name):
        contender: Contender
        if split_name(name)[0] == OURS:
            contender = Ours(setting, schedules[name])
        else:
            contender = TorchSchedule(setting, name)
    yield contender
    contender.close()
