"""Steps of one contender, timed without waiting between them; and peak memory.

    warm-up          counted
    |---|---|---|---o----o----o----o      o  end of a step on this process

A step lasts from one end to the next, and the mean over the processes is shown: in the
long run it is the same on all of them. On GPUs ends are events in the stream, read when
all steps are done.
"""

import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch

from zbpp.bench.contender import Contender, Setting, gather
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.streams import recorded_event

__all__ = ["Turn", "take_turn"]


@dataclass(frozen=True)
class Turn:
    """Figures of one contender's turn, the same in all processes.

    Args:
        steps_s: seconds of each step.
        peak_bytes: of each process by torch's allocator; None on CPUs.
        host_s: CPU seconds of each process's main thread for a job.
    """

    steps_s: tuple[float, ...]
    peak_bytes: tuple[int | None, ...]
    host_s: tuple[float, ...]


def take_turn(contender: Contender, setting: Setting) -> Turn:
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
    """The present by the host's clock; on a GPU when its stream has come to it."""
    if not runs_ahead(device):
        return time.perf_counter()
    return recorded_event(device)


def _seconds_between(ends: list[Any], device: torch.device) -> list[float]:
    """On a GPU this waits for the last one."""
    if not runs_ahead(device):
        return [after - before for before, after in pairwise(ends)]
    ends[-1].synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(ends)]
