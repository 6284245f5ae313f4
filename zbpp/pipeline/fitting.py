"""Requests that would have fitted: a smaller micro-batch, another mode and split.

Both follow from the memory of the chunks, in bytes, that the schedule was planned for.
What passes leave and need is taken to grow with the samples of a micro-batch; what is
there all the time, and in an optimizer step, does not.
"""

import math
from dataclasses import dataclass, fields, replace

from zbpp.core import (
    Costs,
    LayerCosts,
    MemoryModel,
    RequestError,
    Schedule,
    format_bytes,
    peaks,
)
from zbpp.core.costs import chunk_layers
from zbpp.memory.api import most_that_fits
from zbpp.modes import MODES
from zbpp.planning.layer_plans import plan_layers
from zbpp.schedules import LayerPlan

__all__ = ["Room", "largest_that_fits", "mode_that_fits", "what_fits"]

_CONSTANT = ("limit", "m_fixed", "peak_o")
_PARTS = 1000
"""Of a micro-batch whose samples are not known."""
_SMALL = 128  # stages times micro-batches: splits of larger plans stay even


@dataclass(frozen=True)
class Room:
    """Bytes that a stage may hold, and what is known of the batch.

    Args:
        bytes: of a stage.
        samples: of a micro-batch; None: this stage does not read them.
    """

    bytes: float
    samples: int | None = None


def what_fits(
    schedule: Schedule, costs: Costs | None, memory: MemoryModel, room: Room
) -> str:
    """Say in words what would have fitted; empty if nothing would.

    Args:
        schedule: that ran out of memory.
        costs: of its chunks; None: all equal.
        memory: of its chunks, in bytes.
        room: for each stage.
    """
    found = []
    whole = room.samples or _PARTS
    most = largest_that_fits(schedule, memory, room.bytes, whole)
    if 0 < most < whole:
        size = (
            f"{most} of its {whole} samples"
            if room.samples
            else f"at most {most / whole:.0%} of its samples"
        )
        found.append(f"{schedule.name} with micro-batches of {size}")
    other = mode_that_fits(schedule, costs, memory, room.bytes)
    if other is not None:
        layers = "-".join(map(str, other[1].split))
        found.append(
            f"{other[0]} with {layers} layers a chunk, which holds at most "
            f"{format_bytes(other[1].peak)}"
        )
    if not found:
        return ""
    return f"by the estimate {format_bytes(room.bytes)} fit {'; '.join(found)}"


def largest_that_fits(
    schedule: Schedule, memory: MemoryModel, limit: float, samples: int
) -> int:
    """The most samples of a micro-batch with which the same orders fit; 0: none.

    Args:
        schedule: its orders.
        memory: of its chunks, for ``samples`` in a micro-batch.
        limit: bytes of a stage.
        samples: of a micro-batch; no more are tried.
    """

    def need(n: int) -> float:
        if n > samples:
            return math.inf
        held = _with_share(memory, n / samples).on(schedule.placement)
        return max(peaks(schedule.orders, held))

    return most_that_fits(need, limit, samples)


def _with_share(memory: MemoryModel, share: float) -> MemoryModel:
    """Memory with a micro-batch of a share of the samples, without a limit."""

    def scaled(value: float | tuple[float, ...]) -> float | tuple[float, ...]:
        if isinstance(value, tuple):
            return tuple(share * one for one in value)
        return share * value

    smaller = {
        field.name: scaled(value)
        for field in fields(memory)
        if field.name not in _CONSTANT
        and (value := getattr(memory, field.name)) is not None
    }
    return replace(memory, limit=None, **smaller)


def mode_that_fits(
    schedule: Schedule, costs: Costs | None, memory: MemoryModel, limit: float
) -> tuple[str, LayerPlan] | None:
    """The mode with the shortest step whose best split fits; None: none does.

    Args:
        schedule: with the micro-batches that stay.
        costs: of its chunks; None: all equal.
        memory: of its chunks; their layers are taken to be equal.
        limit: bytes of a stage.
    """
    placement, m = schedule.placement, schedule.n_microbatches
    try:
        layers: LayerCosts = chunk_layers(
            replace(costs or Costs(), splits=None),
            replace(memory, limit=None),
            *(placement, schedule.split),
        )
    except RequestError:
        return None
    layers = replace(layers, limit=limit)
    found: list[tuple[str, LayerPlan]] = []
    for mode in MODES:
        if mode == "auto":
            continue
        try:
            planned = plan_layers(
                *(mode, layers),
                n_stages=schedule.n_stages,
                n_microbatches=m,
                split="balanced" if schedule.n_stages * m <= _SMALL else "even",
                effort="fast",
            )
        except RequestError:
            continue
        found.append((mode, planned))
    return min(found, key=lambda one: one[1].figures, default=None)
