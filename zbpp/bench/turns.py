"""Steps of one contender, timed without waiting between them; and peak memory.

    warm-up          counted
    |---|---|---|---o----o----o----o      o  end of a step on this process

A step lasts from the last stage's end of the one before to the last stage's end of its
own, by the clock of the first process. On GPUs ends are events in the stream, read when
all steps are done.
"""

import ctypes
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from zbpp.bench.contender import Contender, gather
from zbpp.runtime.comm.clocks import clock_name, compare_clocks
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.streams import timed_event

__all__ = ["Turn", "periods", "take_turn"]


@dataclass(frozen=True)
class Turn:
    """Figures of one contender's turn, the same in all processes.

    Args:
        steps_s: seconds of each step.
        peak_bytes: of each process, while it ran; None where it is not known.
        host_s: CPU seconds of each process's main thread for a job.
    """

    steps_s: tuple[float, ...]
    peak_bytes: tuple[int | None, ...]
    host_s: tuple[float, ...]


def take_turn(
    contender: Contender, device: torch.device, *, warmup: int, steps: int
) -> Turn:
    """Run the steps of a turn (every rank must call)."""
    reset = _reset_peak(device)
    gather(None)
    for _ in range(warmup):
        contender.step()
    clock = _Clock(device)
    clock.mark()
    cpu = time.thread_time()
    for _ in range(steps):
        contender.step()
        clock.mark()
    cpu = time.thread_time() - cpu
    step_ends = clock.seconds()
    contender.settle()
    peak = _peak(device) if reset else None
    host = cpu / (steps * max(1, contender.n_jobs))
    names, ends, peaks, hosts = zip(
        *gather((clock_name(), step_ends, peak, host)), strict=True
    )
    clocks = compare_clocks(gather, names)
    ends = tuple(
        [end - ahead for end in of_process]
        for of_process, ahead in zip(ends, clocks.ahead_s, strict=True)
    )
    return Turn(tuple(periods(ends)), tuple(peaks), tuple(hosts))


def periods(ends: Sequence[Sequence[float]]) -> list[float]:
    """Times between the last process's ends of one step and of the next.

    >>> periods([[0.0, 2.0, 5.0], [1.0, 2.5, 4.0]])
    [1.5, 2.5]
    """
    last = [max(of_step) for of_step in zip(*ends, strict=True)]
    return [after - before for before, after in pairwise(last)]


class _Clock:
    """Moments by the host's clock; on a GPU when its stream has come to them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self._zero = 0.0

    def mark(self) -> None:
        """Note the present."""
        if not runs_ahead(self._device):
            self._marks.append(time.perf_counter())
            return
        event = timed_event(self._device)
        event.record()
        if not self._marks:
            event.synchronize()
            self._zero = time.perf_counter()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """All moments so far; on a GPU this waits for the last one."""
        if not runs_ahead(self._device):
            return list(self._marks)
        first, last = self._marks[0], self._marks[-1]
        last.synchronize()
        return [self._zero + first.elapsed_time(mark) / 1e3 for mark in self._marks]


def _reset_peak(device: torch.device) -> bool:
    """Forget the largest memory so far; False if that cannot be."""
    if runs_ahead(device):
        torch.accelerator.reset_peak_memory_stats(device)
        return True
    if sys.platform != "linux":
        return False
    try:
        ctypes.CDLL(None).malloc_trim(0)  # of what earlier contenders have freed
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc
    except (AttributeError, OSError):
        return False
    return True


def _peak(device: torch.device) -> int | None:
    """Largest memory since then: of torch on its GPU, else resident."""
    if runs_ahead(device):
        return int(torch.accelerator.max_memory_allocated(device))
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return None
