"""The CSV that ``torch.distributed.pipelining`` loads and runs.

One row a rank, one cell a pass: ``<chunk><letter><micro-batch>``. torch's letters are
not ours: its ``B`` is the full backward, its ``I`` the input gradient. It adds the
transfers itself and leaves the optimizer to the caller, so O and V are left out:

    runtime = _PipelineScheduleRuntime(stages, n_microbatches, loss_fn=loss_fn)
    runtime._load_csv("schedule.csv")        # torch 2.13; stage_index = our chunk

A schedule with collectives is written in torch's other format, with its transfers, as
torch would add collectives of its own to one without:

    runtime._load_csv("schedule.csv", format="compute_comms")

torch waits for a sum where it starts it, so REDUCE_WAIT is left out, and its W wants
the parameters gathered, so a chunk's RESHARD comes behind its last pass.
"""

from collections.abc import Iterator, Sequence

from zbpp.core import (
    KINDS,
    Collective,
    CollectiveKind,
    Instruction,
    Pair,
    Pass,
    PassKind,
    Placement,
    Receive,
    Schedule,
    Send,
    Value,
    What,
    reader,
)
from zbpp.schedules.passes.lower import lower

__all__ = [
    "to_torch_csv",
    "torch_schedule_name",
]

_LAST = (*PassKind, CollectiveKind.REDUCE_GRAD)


def to_torch_csv(schedule: Schedule) -> str:
    r"""Write a schedule in torch's ``compute_only`` format: n_stages lines, no header.

    With collectives in ``compute_comms``, with all transfers.

    >>> from zbpp.schedules import plan_zb_h1
    >>> to_torch_csv(plan_zb_h1(n_stages=1, n_microbatches=2))
    '0F0,0I0,0W0,0F1,0I1,0W1\n'
    """
    orders: Sequence[Sequence[Instruction]] = schedule.orders
    if any(isinstance(job, Collective) for order in orders for job in order):
        orders = [[*_for_torch(order)] for order in lower(schedule, ahead=0)]
    rows = (",".join(filter(None, map(_cell, order))) for order in orders)
    return "".join(f"{row}\n" for row in rows)


def _cell(instruction: Instruction) -> str:
    """Write an instruction as torch does; empty if torch has none like it."""
    match instruction:
        case Pass(kind, chunk, microbatch):
            return f"{chunk}{KINDS[kind].torch}{microbatch}"
        case Pair(forward, backward):
            return (
                f"({_cell(forward)};{_cell(backward)}){KINDS[instruction.kind].torch}"
            )
        case Collective(kind, chunk) if KINDS[kind].torch is not None:
            return f"{chunk}{KINDS[kind].torch}"
        case Send(Value() as value):
            letter = "F" if value.what is What.ACTIVATION else "B"
            return f"{value.chunk}SEND_{letter}{value.microbatch}"
        case Receive(Value() as value):
            letter = "F" if value.what is What.ACTIVATION else "B"
            return f"{reader(value)}RECV_{letter}{value.microbatch}"
    return ""


def _for_torch(order: Sequence[Instruction]) -> Iterator[Instruction]:
    """Gather each chunk once, and free it behind its last pass and the sum after it."""
    last = {
        instruction.chunk: column
        for column, instruction in enumerate(order)
        if isinstance(instruction, Pass | Collective) and instruction.kind in _LAST
    }
    frees = {Collective(CollectiveKind.RESHARD, chunk) for chunk in last}
    frees.intersection_update(order)
    gathered: set[Instruction] = set()
    for column, instruction in enumerate(order):
        if instruction not in frees and instruction not in gathered:
            yield instruction
        if isinstance(instruction, Pass | Collective):
            if instruction.kind is CollectiveKind.UNSHARD:
                gathered.add(instruction)
            free = Collective(CollectiveKind.RESHARD, instruction.chunk)
            if last[instruction.chunk] == column and free in frees:
                yield free


def torch_schedule_name(placement: Placement) -> str | None:
    """Name the schedule of torch whose placement of chunks is this one, if any.

    torchtitan places the chunks by that name, also where it runs a CSV. A name of
    another placement lets the ranks wait for messages that are never sent.

    >>> torch_schedule_name(Placement.wave(4))
    'ZBVZeroBubble'
    """
    p = placement.n_stages
    if placement == Placement.single(p):
        return "1F1B"
    if placement == Placement.wave(p):
        return "ZBVZeroBubble"
    if placement == Placement.interleaved(p, placement.n_chunks // p):
        return "Interleaved1F1B"
    return None
