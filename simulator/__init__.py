"""Time a schedule, measure it, draw it."""

from zbpp.simulator.engine import simulate
from zbpp.simulator.metrics import (
    bubble_rate,
    idle,
    makespan,
    memory_over_time,
    overhead,
    peak_memory,
    span,
    stage_span,
    step_time,
    work,
)

__all__ = [
    "bubble_rate",
    "idle",
    "makespan",
    "memory_over_time",
    "overhead",
    "peak_memory",
    "simulate",
    "span",
    "stage_span",
    "step_time",
    "work",
]
