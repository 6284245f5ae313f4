"""Say what was held when memory ran out, and what would need less.

held        by this stage, part by part
estimated   the most that the schedule holds, where the memory model is in bytes
fits        the largest micro-batch that would have fitted by that
instead     modes that promise fewer forwards in flight; smaller micro-batches
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from zbpp.core import Costs, MemoryModel, PassKind, Schedule, format_bytes, peaks
from zbpp.core.costs.columns import columns_of
from zbpp.core.costs.units import is_in_bytes
from zbpp.memory.api import most_that_fits
from zbpp.planning import Plan
from zbpp.planning.modes import promised_memory
from zbpp.profiling.memory import Held, account, is_out_of_memory
from zbpp.runtime.executor import Executor
from zbpp.runtime.microbatches import count_samples
from zbpp.runtime.support.devices import runs_ahead

__all__ = ["Room", "explain", "largest_that_fits", "memory_explained"]


_CONSTANT = ("limit", "m_fixed", "peak_o")
_PARTS = 1000
"""Of a micro-batch whose samples are not known."""


@dataclass(frozen=True)
class Room:
    """Bytes that a stage may hold, and what is known of the batch.

    Args:
        bytes: of a stage.
        samples: of a micro-batch; None: this stage does not read them.
    """

    bytes: float
    samples: int | None = None


@contextmanager
def memory_explained(
    executors: Mapping[int, Executor],
    schedule: Schedule,
    plan: Plan,
) -> Iterator[None]:
    """Add a note to an error that memory has run out.

    Args:
        executors: of this process.
        schedule: that runs.
        plan: memory that it was planned for, used if it is in bytes, and layers of
            the chunks.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            held = [account(stage, one) for stage, one in executors.items()]
            error.add_note(
                explain(
                    held,
                    replace(schedule, split=plan.split),
                    plan.costs,
                    room=_room(executors, held, plan.costs),
                )
            )
        raise


def _room(
    executors: Mapping[int, Executor], held: list[Held], costs: Costs
) -> Room | None:
    """The limit that was planned for, or what the GPU has; None: neither is known."""
    stages = [one.stage for one in executors.values()]
    limit = costs.limit
    known: float | None = min(limit) if isinstance(limit, tuple) else limit
    if known is None and runs_ahead(stages[0].device):
        known = torch.accelerator.get_memory_info(stages[0].device)[1]
    if known is None and all(one.exact for one in held):
        known = sum(one.total or 0.0 for one in held)
    inputs = [one.inputs for one in stages if one.inputs]
    samples = count_samples(inputs[0][0]) if inputs else None
    return None if known is None else Room(known, samples)


def explain(
    held: list[Held],
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    room: Room | None = None,
) -> str:
    """Text about an out-of-memory error.

    Args:
        held: of the stages of this process.
        schedule: that has run.
        costs: of its chunks; None, or memory not in bytes: there is no estimate.
        room: that stages have; None: nothing is said of what fits.
    """
    stages = [one.stage for one in held]
    lines = ["out of memory: " + "; ".join(one.text for one in held)]
    if costs is not None and is_in_bytes(costs):
        most = peaks(schedule.orders, costs.on(schedule.placement))
        estimated = ", ".join(f"stage {s} {format_bytes(most[s])}" for s in stages)
        lines.append(f"estimated for {schedule.name}: {estimated}")
        if room is not None and (fits := _smaller(schedule, costs, room)):
            lines.append(fits)
    lines.append(_instead(held, schedule))
    return "\n".join(lines)


def _smaller(schedule: Schedule, costs: Costs, room: Room) -> str:
    """Say which micro-batches would have fitted by the estimate; empty if none."""
    whole = room.samples or _PARTS
    most = largest_that_fits(schedule, costs, room.bytes, whole)
    if not 0 < most < whole:
        return ""
    size = (
        f"{most} of its {whole} samples"
        if room.samples
        else f"at most {most / whole:.0%} of its samples"
    )
    return (
        f"by the estimate {format_bytes(room.bytes)} fit {schedule.name} with "
        f"micro-batches of {size}"
    )


def largest_that_fits(
    schedule: Schedule, costs: Costs, limit: float, samples: int
) -> int:
    """The most samples of a micro-batch with which the same orders fit; 0: none.

    Args:
        schedule: its orders.
        costs: of its chunks, for ``samples`` in a micro-batch.
        limit: bytes of a stage.
        samples: of a micro-batch; no more are tried.
    """

    def need(n: int) -> float:
        if n > samples:
            return math.inf
        held = _with_share(costs, n / samples).on(schedule.placement)
        return max(peaks(schedule.orders, held))

    return most_that_fits(need, limit, samples)


def _with_share(costs: Costs, share: float) -> Costs:
    """Costs of a micro-batch with a share of the samples' memory, without a limit."""

    def scaled(value: float | tuple[float, ...]) -> float | tuple[float, ...]:
        if isinstance(value, tuple):
            return tuple(share * one for one in value)
        return share * value

    smaller: dict[str, Any] = {
        name: scaled(value)
        for name in columns_of(MemoryModel)
        if name not in _CONSTANT and (value := getattr(costs, name)) is not None
    }
    return replace(costs, limit=None, **smaller)


def _instead(held: list[Held], schedule: Schedule) -> str:
    """Modes that promise to hold less, the one that holds most of them first.

    Nothing is planned here: the other stages wait for this one.
    """
    stages = [one.stage for one in held]
    now = max(_in_flight(schedule)[stage] for stage in stages)
    promised = promised_memory(schedule.n_stages)
    less = sorted(
        ((peak, mode) for mode, peak in promised.items() if peak < now - 1e-9),
        reverse=True,
    )
    each = max((one.each or 0.0) for one in held)
    known = max(one.known for one in held)

    def told(peak: float) -> str:
        about = f", about {format_bytes(known + peak * each)}" if each else ""
        return f"{peak:.3g} forwards in flight{about}"

    modes = ", ".join(f"{mode} (at most {told(peak)})" for peak, mode in less)
    needs = f"{schedule.name} keeps {told(now)} here"
    instead = f"; less memory need {modes}" if modes else "; no mode promises less"
    return (
        f"{needs}{instead}; or cut the batch into more, smaller micro-batches, "
        "recompute layers, or use more stages (`zbpp estimate` tells what fits)"
    )


def _in_flight(schedule: Schedule) -> list[float]:
    """The most forwards in flight, in those of a whole stage, backward not begun."""
    m_w = 0.0 if schedule.runs(PassKind.BW) else 0.5
    kept_by_b = Costs(m_b=1.0, m_w=m_w)
    return peaks(schedule.orders, kept_by_b.on(schedule.placement))
