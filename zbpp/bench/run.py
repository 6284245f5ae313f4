"""A bench: its start, and one process's share of it.

Contenders take turns: built, warmed up, timed, closed. So a slow spell of the machine
hits all of them, and no contender adds to the memory of another. In the first turn
the loss and the gradient norm of a contender's first step must be those of the first
contender; else it is not timed. In the last turn the jobs of ours are read too.

    warm-up          counted
    |---|---|---|---o----o----o----o      o  end of a step on this process

A step lasts from one end to the next, and the mean over the processes is shown: in the
long run it is the same on all of them. On GPUs ends are events in the stream, read when
all steps are done.
"""

import gc
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from zbpp.bench.ours import Ours, resolved
from zbpp.bench.request import OURS, BenchOptions, BenchPlan, planned
from zbpp.bench.results import Outcome, Turn, write_results
from zbpp.bench.setting import Setting, StepBatch, gather, seeded_model, step_batch
from zbpp.bench.torchs import TorchSchedule
from zbpp.core import RequestError
from zbpp.runtime.comm.process_group import initialise
from zbpp.runtime.support.devices import asked_device, runs_ahead
from zbpp.runtime.support.errors import PeerError
from zbpp.runtime.support.streams import recorded_event
from zbpp.training.launch import start

_TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}
"""Largest relative difference of losses and of gradient norms, by dtype."""
_TIMEOUT_S = 600.0


def start_bench(options: BenchOptions, words: Sequence[str]) -> None:
    """Run a bench, and return when it is done.

    Raises:
        RequestError: the request is wrong, or a contender cannot run.
        WorkerError: a process was killed.
    """
    start(_run, options, words, plan=partial(planned, words))


def _run(options: BenchOptions, plan: BenchPlan) -> int:
    """Run one process's share; 1 if a contender computes something else."""
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
    schedules = {x: resolved(setting, x) for x in plan.schedules if x.startswith(OURS)}
    outcomes = [Outcome(name) for name in plan.schedules]
    first: tuple[float, float] | None = None
    for turn in range(options.rounds):
        racing = [outcome for outcome in outcomes if not outcome.reason]
        for outcome in racing if turn % 2 == 0 else reversed(racing):
            with _refusals(outcome.name):
                contender: Ours | TorchSchedule
                if outcome.name in schedules:
                    contender = Ours(setting, schedules[outcome.name])
                else:
                    contender = TorchSchedule(setting, outcome.name)
                if turn == 0 and not sleeps:
                    step = contender.compared_step()
                    first = first or step
                    tolerance = _TOLERANCE[options.dtype]
                    outcome.reason = difference(first, step, tolerance)
            if not outcome.reason:
                outcome.turns.append(_take_turn(contender, setting))
                if turn == options.rounds - 1 and isinstance(contender, Ours):
                    mode = outcome.name.removeprefix(OURS)
                    outcome.jobs = contender.jobs(mode, options.steps_a_turn)
            contender.close()
            del contender
            gc.collect()
            if runs_ahead(device):
                torch.accelerator.empty_cache()
    wrong = [f"{x.name} ({x.reason})" for x in outcomes if x.reason]
    if dist.get_rank() == 0:
        write_results(setting, outcomes)
        if wrong:
            print(f"zbpp: not timed: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def difference(
    first: tuple[float, float], step: tuple[float, float], tolerance: float
) -> str:
    """Text about a wrong loss or gradient norm of a step; empty: both are right.

    >>> difference((2.0, 1.0), (2.0, 1.001), 1e-5)
    'refused: gradient norm 1.001, not 1'
    """
    for name, wanted, found in zip(("loss", "gradient norm"), first, step, strict=True):
        if not math.isclose(wanted, found, rel_tol=tolerance):  # NaN is not
            return f"refused: {name} {found:.8g}, not {wanted:.8g}"
    return ""


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """Within this, errors name the contender that cannot run.

    What torch raises before and in its first step is what it cannot do with the model
    and the sizes.
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
        if name.startswith(OURS):
            raise
        text = (str(error) or repr(error)).splitlines()[0]
        raise RequestError(
            f"{name} cannot run: torch raises {type(error).__name__}: {text}; leave it "
            "out of --peers"
        ) from error


def _take_turn(contender: Ours | TorchSchedule, setting: Setting) -> Turn:
    """Run the steps of a turn (every rank must call)."""
    device, n = setting.device, setting.options.steps_a_turn
    has_peak = runs_ahead(device)
    if has_peak:
        torch.accelerator.reset_peak_memory_stats(device)
    gather(None)
    for _ in range(setting.options.warmup):
        contender.step()
    ends = [_now(device)]
    cpu = time.thread_time()
    for _ in range(n):
        contender.step()
        ends.append(_now(device))
    host = (time.thread_time() - cpu) / (n * max(1, contender.n_jobs))
    steps = _seconds_between(ends, device)
    peak = torch.accelerator.max_memory_allocated(device) if has_peak else None
    of_processes, peaks, hosts = zip(*gather((steps, peak, host)), strict=True)
    steps_s = tuple(map(fmean, zip(*of_processes, strict=True)))
    return Turn(steps_s, tuple(peaks), tuple(hosts))


def _now(device: torch.device) -> Any:
    """The time by the host's clock; on a GPU when its stream has reached the call."""
    if not runs_ahead(device):
        return time.perf_counter()
    return recorded_event(device)


def _seconds_between(ends: list[Any], device: torch.device) -> list[float]:
    """On a GPU this waits for the last one."""
    if not runs_ahead(device):
        return [after - before for before, after in pairwise(ends)]
    ends[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(ends)]
