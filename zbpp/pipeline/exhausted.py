"""Say what was held when memory ran out, and what would need less.

held        by this stage, part by part
estimated   the most that the schedule holds, where the memory model is in bytes
instead     modes that keep fewer forwards in flight; smaller micro-batches
fits        the largest micro-batch, and the mode and split, that would have fitted
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from zbpp.core import (
    Costs,
    MemoryModel,
    PassKind,
    RequestError,
    Schedule,
    format_bytes,
)
from zbpp.modes import MODES, plan
from zbpp.pipeline.fitting import Room, what_fits
from zbpp.planning.resolve_layers import Chosen
from zbpp.profiling.memory import Held, account, is_out_of_memory
from zbpp.runtime.executor import Executor
from zbpp.runtime.microbatches import count_samples
from zbpp.simulator import peak_memory, simulate

__all__ = ["explain", "memory_explained"]

_BYTES = 1e4
"""A micro-batch of a stage takes more bytes than this, and fewer of any other unit."""


@contextmanager
def memory_explained(
    executors: Mapping[int, Executor],
    schedule: Schedule,
    chosen: Chosen,
) -> Iterator[None]:
    """Add a note to an error that memory has run out.

    Args:
        executors: of this process.
        schedule: that runs.
        chosen: costs and memory that it was planned for, and layers of the chunks; the
            memory is used if it is in bytes.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            held = [account(stage, one) for stage, one in executors.items()]
            error.add_note(
                explain(
                    held,
                    replace(schedule, split=tuple(chosen.split)),
                    chosen.memory,
                    costs=chosen.costs,
                    room=_room(executors, held, chosen.memory),
                )
            )
        raise


def _room(
    executors: Mapping[int, Executor], held: list[Held], memory: MemoryModel | None
) -> Room | None:
    """The limit that was planned for, or what the GPU has; None: neither is known."""
    stages = [one.stage for one in executors.values()]
    limit = None if memory is None else memory.limit
    known: float | None = min(limit) if isinstance(limit, tuple) else limit
    if known is None and stages[0].device.type == "cuda":
        known = torch.cuda.mem_get_info(stages[0].device)[1]
    if known is None and all(one.exact for one in held):
        known = sum(one.total or 0.0 for one in held)
    inputs = [one.inputs for one in stages if one.inputs]
    samples = count_samples(inputs[0][0]) if inputs else None
    return None if known is None else Room(known, samples)


def explain(
    held: list[Held],
    schedule: Schedule,
    memory: MemoryModel | None = None,
    *,
    costs: Costs | None = None,
    room: Room | None = None,
) -> str:
    """Text about an out-of-memory error.

    Args:
        held: of the stages of this process.
        schedule: that has run.
        memory: of its chunks, in bytes; None, or another unit: there is no estimate.
        costs: of its chunks, to choose among modes that fit.
        room: that stages have; None: nothing is said of what fits.
    """
    stages = [one.stage for one in held]
    lines = ["out of memory: " + "; ".join(one.text for one in held)]
    if memory is not None and _in_bytes(memory):
        peaks = peak_memory(simulate(schedule), memory)
        estimated = ", ".join(f"stage {s} {format_bytes(peaks[s])}" for s in stages)
        lines.append(f"estimated for {schedule.name}: {estimated}")
        if room is not None and (fits := what_fits(schedule, costs, memory, room)):
            lines.append(fits)
    lines.append(_instead(held, schedule))
    return "\n".join(lines)


def _instead(held: list[Held], schedule: Schedule) -> str:
    """Modes that hold less on these stages, the one that holds most of them first."""
    stages = [one.stage for one in held]
    now = max(_in_flight(schedule)[stage] for stage in stages)
    found = []
    for mode in MODES:
        if mode == "auto":
            continue
        try:
            other = plan(
                mode,
                n_stages=schedule.n_stages,
                n_microbatches=schedule.n_microbatches,
                effort="fast",
            )
        except RequestError:
            continue
        peak = max(_in_flight(other)[stage] for stage in stages)
        if peak < now - 1e-9:
            found.append((peak, mode))
    found.sort(reverse=True)
    each = max((one.each or 0.0) for one in held)
    known = max(one.known for one in held)

    def told(peak: float) -> str:
        about = f", about {format_bytes(known + peak * each)}" if each else ""
        return f"{peak:.3g} forwards in flight{about}"

    modes = ", ".join(f"{mode} ({told(peak)})" for peak, mode in found[:4])
    needs = f"{schedule.name} keeps {told(now)} here"
    less = f"; less memory need {modes}" if modes else "; no mode needs less"
    return (
        f"{needs}{less}; or cut the batch into more, smaller micro-batches, recompute "
        "layers, or use more stages (`zbpp estimate` tells what fits)"
    )


def _in_flight(schedule: Schedule) -> list[float]:
    """The most forwards in flight, in those of a whole stage, backward not begun."""
    kept_by_b = MemoryModel(m_b=1.0, m_w=0.0 if _has_joint(schedule) else 0.5)
    return peak_memory(simulate(schedule), kept_by_b)


def _has_joint(schedule: Schedule) -> bool:
    return schedule.runs(PassKind.BW)


def _in_bytes(memory: MemoryModel) -> bool:
    m_b = memory.m_b
    return max(m_b if isinstance(m_b, tuple) else (m_b,)) > _BYTES
