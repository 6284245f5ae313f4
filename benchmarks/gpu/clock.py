"""Times of work on a device, and of the host that issues it."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["finish", "ratio_row", "seconds", "spin", "spin_cycles_per_s"]

_CYCLES = 10**7
_HEAD_START_S = 5e-3


def finish(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_rates: dict[torch.device, float] = {}


def spin_cycles_per_s(device: torch.device) -> float:
    """Count the cycles that a spinning kernel takes in a second."""
    if device not in _rates:
        rates = []
        for _ in range(6):
            start, end = _event(), _event()
            start.record()
            torch.cuda._sleep(_CYCLES)
            end.record()
            end.synchronize()
            rates.append(_CYCLES / (start.elapsed_time(end) / 1e3))
        _rates[device] = statistics.median(rates[1:])
    return _rates[device]


def spin(device: torch.device, duration_s: float) -> None:
    """Occupy the current stream, and one multiprocessor; on a CPU, sleep."""
    if device.type == "cuda":
        torch.cuda._sleep(int(duration_s * spin_cycles_per_s(device)))
    else:
        time.sleep(duration_s)


def seconds(device: torch.device, work: Callable[[], object]) -> tuple[float, float]:
    """Run some work; seconds of the device, and of the host's thread.

    The host gets a head start, so that its own time is not a part of the device's.
    """
    finish(device)
    if device.type != "cuda":
        began, cpu = time.perf_counter(), time.thread_time()
        work()
        return time.perf_counter() - began, time.thread_time() - cpu
    spin(device, _HEAD_START_S)
    start, end = _event(), _event()
    start.record()
    cpu = time.thread_time()
    work()
    cpu = time.thread_time() - cpu
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3, cpu


def ratio_row(ratios: list[float]) -> list[float]:
    """Median and quartiles."""
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return [statistics.median(ratios), low, high]


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
