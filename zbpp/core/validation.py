"""The rules of a schedule. Each is one linear scan; the first breach is reported."""

from collections.abc import Sequence

from zbpp.core.amounts import format_memory
from zbpp.core.clock import replay
from zbpp.core.collectives.rules import collective_mistake, unequal_mistake
from zbpp.core.costs import Costs, MemoryModel
from zbpp.core.errors import RequestError, ScheduleError
from zbpp.core.jobs import Check, Collective, Job, Pass, PassKind, Step
from zbpp.core.memory import held_during
from zbpp.core.placement import Placement
from zbpp.core.quick import can_finish, is_plain
from zbpp.core.text import grid

__all__ = ["Recompute", "check_layers", "mistake", "validate"]

Orders = Sequence[Sequence[Job]]
Recompute = bool | tuple[int, ...]
"""All layers of a chunk, none, or these, counted from 0 in the chunk."""
F, B, W, BW = PassKind.F, PassKind.B, PassKind.W, PassKind.BW


def mistake(
    rows: Sequence[Sequence[object]], row: int, column: int, reason: str
) -> ScheduleError:
    """Name the place of a mistake and show it in the grid."""
    return ScheduleError(
        f"row {row}, column {column} (counted from 0): {reason}\n"
        + grid(rows, mark=(row, column))
    )


def validate(
    placement: Placement,
    n_microbatches: int,
    orders: Orders,
    memory: MemoryModel | None,
) -> None:
    """Check all rules.

    Raises:
        RequestError: there is no micro-batch, or not one row a stage.
        ScheduleError: a job breaks a rule; the message marks it.
    """
    if n_microbatches < 1:
        raise RequestError(f"n_microbatches is {n_microbatches}; it must be at least 1")
    if len(orders) != placement.n_stages:
        raise ScheduleError(
            f"{len(orders)} rows of jobs for {placement.n_stages} stages; "
            "there must be one row a stage"
        )
    all_plain = True
    for stage, order in enumerate(orders):
        if is_plain(order, placement, stage, n_microbatches=n_microbatches):
            continue
        all_plain = False
        seen: dict[Job, int] = {}
        for column, job in enumerate(order):
            reason = (
                _misplaced(job, placement, n_microbatches, stage)
                or _repeated(job, seen)
                or _untimely(job, seen, stage)
            )
            if reason:
                raise mistake(orders, stage, column, reason)
            seen[job] = column
        reason = _missing(seen, placement, n_microbatches, stage)
        if reason:
            raise mistake(orders, stage, len(order), reason)
        found = collective_mistake(order)
        if found:
            raise mistake(orders, stage, *found)
    unequal = None if all_plain else unequal_mistake(orders, placement)
    if unequal:
        stage, reason = unequal
        raise mistake(orders, stage, len(orders[stage]), reason)
    _check_steps(orders)
    _check_progress(orders, placement, n_microbatches)
    if memory is not None:
        _check_memory(orders, placement, memory)


def _misplaced(
    job: Job, placement: Placement, n_microbatches: int, stage: int
) -> str | None:
    """Explain why a job is none of this stage's; None if it is."""
    if isinstance(job, Step | Check):
        if job.stage != stage:
            return f"{job} of stage {job.stage} stands on stage {stage}"
        return None
    if not 0 <= job.chunk < placement.n_chunks:
        return f"{job}: the chunks are 0 to {placement.n_chunks - 1}"
    if isinstance(job, Pass) and not 0 <= job.microbatch < n_microbatches:
        return f"{job}: the micro-batches are 0 to {n_microbatches - 1}"
    home = placement.stage_of[job.chunk]
    if home != stage:
        return (
            f"{job} stands on stage {stage}, but chunk {job.chunk} is on stage {home}; "
            "move it there"
        )
    return None


def _repeated(job: Job, seen: dict[Job, int]) -> str | None:
    """Explain that the work of a job is done already; None if not."""
    if isinstance(job, Collective):  # one may come once more: see its own rules
        return None
    same: list[Job] = [job]
    if isinstance(job, Pass):
        rivals = {BW: (B, W), B: (BW,), W: (BW,), F: ()}[job.kind]
        same += [Pass(kind, job.chunk, job.microbatch) for kind in rivals]
    for other in same:
        if other in seen:
            return f"{job} repeats {other} of column {seen[other]}; remove one"
    return None


def _untimely(job: Job, seen: dict[Job, int], stage: int) -> str | None:
    """Explain that a job comes before its input, or after O; None if not."""
    if Step(stage) in seen:
        return f"{job} comes after O; the optimizer step must be the last job"
    if isinstance(job, Check):
        if any(isinstance(other, Pass) and other.kind is not F for other in seen):
            return "V must come before the first backward pass of its stage"
        return None
    if not isinstance(job, Pass) or job.kind is F:
        return None
    needed = Pass(B if job.kind is W else F, job.chunk, job.microbatch)
    return None if needed in seen else f"{job} comes before {needed}; swap them"


def _missing(
    seen: dict[Job, int], placement: Placement, n_microbatches: int, stage: int
) -> str | None:
    """Name a pass that the row ends without; None if it has all."""
    for chunk in placement.chunks_of[stage]:
        for i in range(n_microbatches):
            forward, backward, weight, joint = (
                Pass(kind, chunk, i) for kind in (F, B, W, BW)
            )
            if forward not in seen:
                return f"{forward} is missing"
            if joint not in seen and backward not in seen:
                return f"{backward} (with {weight}, or {joint}) is missing"
            if joint not in seen and weight not in seen:
                return f"{weight} is missing"
    return None


def _check_steps(orders: Orders) -> None:
    """All stages step, or none does (then the caller steps); Checks alike."""
    found = [set(map(type, order)) for order in orders]
    for kind in (Step, Check):
        have = [kind in types for types in found]
        if any(have) and not all(have):
            stage = have.index(False)
            name = kind(stage)
            raise mistake(
                orders,
                stage,
                len(orders[stage]),
                f"{name} is missing, though stage {have.index(True)} has one",
            )


def _check_progress(orders: Orders, placement: Placement, n_microbatches: int) -> None:
    """No set of stages may wait for one another."""
    if can_finish(orders, placement, n_microbatches=n_microbatches):
        return
    rows = replay(orders, Costs().on(placement), n_microbatches=n_microbatches)
    stuck = [
        (stage, order[len(row)])
        for stage, (order, row) in enumerate(zip(orders, rows, strict=True))
        if len(row) < len(order)
    ]
    if stuck:
        waits = ", ".join(f"stage {stage} waits at {job}" for stage, job in stuck)
        stage = stuck[0][0]
        raise mistake(
            orders,
            stage,
            len(rows[stage]),
            f"deadlock: {waits}; no stage can go on. Is an F after its B, or do two "
            "stages exchange micro-batches in opposite orders?",
        )


def check_layers(
    placement: Placement,
    split: Sequence[int] | None,
    recompute: Sequence[Recompute] | None,
) -> None:
    """Check that split and recompute have one entry a chunk that can be one.

    Raises:
        RequestError: it names the entry.
    """
    n = placement.n_chunks
    for name, entries in (("split", split), ("recompute", recompute)):
        if entries is not None and len(entries) != n:
            raise RequestError(f"{name} has {len(entries)} entries for {n} chunks")
    for chunk, layers in enumerate(split or ()):
        if layers < 1:
            raise RequestError(f"split[{chunk}] is {layers}; a chunk has 1 or more")
    for chunk, which in enumerate(recompute or ()):
        most = None if split is None else split[chunk]
        for layer in () if isinstance(which, bool) else which:
            if layer < 0 or (most is not None and layer >= most):
                raise RequestError(
                    f"recompute[{chunk}] names layer {layer} of a chunk of "
                    f"{'some' if most is None else most} layers, counted from 0"
                )


def _check_memory(orders: Orders, placement: Placement, model: MemoryModel) -> None:
    """No stage may exceed its limit (with a margin for rounding)."""
    memory = model.on(placement)
    for stage, order in enumerate(orders):
        limit = memory.limit[stage]
        during = held_during(order, memory, stage=stage)
        if max(during, default=0.0) <= limit:
            continue
        for column, held in enumerate(during):
            if held > limit * (1 + 1e-9):
                raise mistake(
                    orders,
                    stage,
                    column,
                    f"{order[column]} needs memory {format_memory(held, [limit])}, "
                    f"over the limit {format_memory(limit, [held])} of stage {stage}; "
                    "run a B or W first",
                )
