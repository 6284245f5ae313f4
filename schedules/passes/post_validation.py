"""Put the validation of the last step into the next iteration's warm-up.

    barrier          F0 F1 B0 W0 B1 W1 | O        O waits for the norm of all stages
    post-validation  F0 F1 V B0 W0 B1 W1 O        O does not; V confirms it

O steps on what its stage knows. The sum of all stages' norms travels while the next
forwards already run, and V compares: an invalid step is rolled back, and the passes
before V are replayed.

Two rules place V as late as they allow:

- before the stage's first backward, which would overwrite the step's gradients;
- no pass before a V may read what another stage has computed after its V. Then every
  message is either sent before its stage's V, and twice if the step was invalid, or
  after it and once; sender and receiver agree without asking each other.
"""

from collections.abc import Sequence
from dataclasses import replace

from zbpp.core import (
    Check,
    Collective,
    Job,
    Order,
    Part,
    PassKind,
    Schedule,
    Step,
    passes_in,
    reads,
    writes,
)


def post_validated(schedule: Schedule) -> Schedule:
    """Give every stage a V in its warm-up and an O at its end.

    Args:
        schedule: any; a schedule with V's is returned unchanged.

    Raises:
        ScheduleError: a schedule with a V on some stages only is not valid.

    >>> from zbpp.schedules import plan_zb_h1
    >>> rows = post_validated(plan_zb_h1(n_stages=2, n_microbatches=2)).orders
    >>> " ".join(map(str, rows[0]))
    '0F0 0F1 V 0B0 0W0 0B1 0W1 O'
    """
    if schedule.is_post_validated:
        return schedule
    cuts = _cuts(schedule)
    orders = []
    for stage, (order, cut) in enumerate(zip(schedule.orders, cuts, strict=True)):
        last: tuple[Job, ...] = () if Step(stage) in order else (Step(stage),)
        orders.append((*order[:cut], Check(stage), *order[cut:], *last))
    parts = None if schedule.parts is None else _parts_with_checks(schedule, cuts)
    return replace(schedule, orders=tuple(orders), parts=parts)


def _parts_with_checks(schedule: Schedule, cuts: Sequence[int]) -> tuple[Order, ...]:
    """Rows of parts with each V before what comes after it in the order."""
    rows = []
    assert schedule.parts is not None
    for stage, (order, row) in enumerate(
        zip(schedule.orders, schedule.parts, strict=True)
    ):
        before = {part for job in order[: cuts[stage]] for part in passes_in(job)}
        starts = [
            column
            for column, job in enumerate(row)
            if not (isinstance(job, Part) and (job.index or job.of in before))
        ]
        at = min(starts, default=len(row))
        last: Order = () if Step(stage) in order else (Step(stage),)
        rows.append((*row[:at], Check(stage), *row[at:], *last))
    return tuple(rows)


def _cuts(schedule: Schedule) -> list[int]:
    """Find the column of each stage before which its V goes."""
    n_chunks = schedule.placement.n_chunks
    cuts = [_first_backward(order) for order in schedule.orders]
    while True:
        late = {
            value
            for order, cut in zip(schedule.orders, cuts, strict=True)
            for job in order[cut:]
            for part in passes_in(job)
            for value in writes(part, n_chunks)
        }
        moved = False
        for stage, order in enumerate(schedule.orders):
            for column, job in enumerate(order[: cuts[stage]]):
                needs = [v for part in passes_in(job) for v in reads(part, n_chunks)]
                if not late.isdisjoint(needs):
                    cuts[stage], moved = column, True
                    break
        if not moved:
            return cuts


def _first_backward(order: tuple[Job, ...]) -> int:
    for column, job in enumerate(order):
        if isinstance(job, Collective):
            continue
        parts = passes_in(job)
        if not parts or any(part.kind is not PassKind.F for part in parts):
            return column
    return len(order)
