"""The CSV that ``torch.distributed.pipelining`` loads and runs: written, and read back.

One row a rank, one cell a pass: ``<chunk><letter><micro-batch>``. torch's letters are
not ours: its ``B`` is the full backward, its ``I`` the input gradient. It adds the
transfers itself and leaves the optimizer to the caller, so O and V are left out:

    runtime = _PipelineScheduleRuntime(stages, n_microbatches, loss_fn=loss_fn)
    runtime._load_csv("schedule.csv")        # torch 2.13; stage_index = our chunk

torch's schedules write such files themselves (``_dump_csv``), with empty cells for idle
times and, if asked, cells for the transfers.

A schedule with collectives is written in torch's other format, with its transfers, as
torch would add collectives of its own to one without:

    runtime._load_csv("schedule.csv", format="compute_comms")

torch waits for a sum where it starts it, so REDUCE_WAIT is left out, and its W wants
the parameters gathered, so a chunk's RESHARD comes behind its last pass.
"""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from zbpp.core import (
    KINDS,
    Collective,
    CollectiveKind,
    Instruction,
    Job,
    Pair,
    PairKind,
    Pass,
    PassKind,
    Placement,
    Receive,
    RequestError,
    Schedule,
    ScheduleError,
    Send,
    Step,
    Value,
    What,
    members_of,
    place_of,
    reader,
)
from zbpp.core.files.json_text import read
from zbpp.schedules.passes.lower import lower

__all__ = [
    "from_torch_csv",
    "is_torch_csv",
    "read_torch_csv",
    "to_torch_csv",
    "torch_schedule_name",
]

_KIND = {KINDS[kind].torch: kind for kind in PassKind}
_WEIGHTS = [kind for kind in PassKind if PassKind.W in KINDS[kind].work]
_LAST = (*PassKind, CollectiveKind.REDUCE_GRAD)
_CELL = re.compile(r"(\d{1,6})([FIWB])(\d{1,6})")
_TRANSFER = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_COLLECTIVE = re.compile(r"(\d{1,6})(UNSHARD|RESHARD|REDUCE_GRAD)")
_PAIR = re.compile(rf"\((.*);(.*)\){PairKind.FB}")


def to_torch_csv(schedule: Schedule) -> str:
    r"""Write a schedule in torch's ``compute_only`` format: n_stages lines, no header.

    With collectives in ``compute_comms``, with all transfers.

    >>> from zbpp.schedules import plan_zb_h1
    >>> to_torch_csv(plan_zb_h1(n_stages=1, n_microbatches=2))
    '0F0,0I0,0W0,0F1,0I1,0W1\n'
    """
    orders: Sequence[Sequence[Instruction]] = schedule.orders
    if any(isinstance(job, Collective) for order in orders for job in order):
        orders = [_for_torch(order) for order in lower(schedule, ahead=0)]
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


def _for_torch(order: Sequence[Instruction]) -> list[Instruction]:
    """Gather each chunk once, and free it behind its last pass and the sum after it."""
    last = {
        instruction.chunk: column
        for column, instruction in enumerate(order)
        if isinstance(instruction, Pass | Collective) and instruction.kind in _LAST
    }
    freed = {
        instruction.chunk: instruction
        for instruction in order
        if isinstance(instruction, Collective)
        and instruction.kind is CollectiveKind.RESHARD
    }
    gathered: set[int] = set()
    instructions: list[Instruction] = []
    for column, instruction in enumerate(order):
        match instruction:
            case Collective(CollectiveKind.RESHARD):
                continue
            case Collective(CollectiveKind.UNSHARD, chunk):
                if chunk in gathered:
                    continue
                gathered.add(chunk)
        instructions.append(instruction)
        if (
            isinstance(instruction, Pass | Collective)
            and last[instruction.chunk] == column
        ):
            instructions += (
                [freed[instruction.chunk]] if instruction.chunk in freed else []
            )
    return instructions


def is_torch_csv(path: str | Path) -> bool:
    """True if the name of a file ends in ``.csv``."""
    return Path(path).suffix.lower() == ".csv"


def read_torch_csv(path: str | Path) -> Schedule:
    """Read a CSV file of torch's as a schedule with the name of the file.

    Raises:
        RequestError: the file cannot be read or holds no valid schedule.
    """
    return from_torch_csv(read(path), name=Path(path).stem, source=str(path))


def from_torch_csv(
    text: str, *, name: str = "torch", source: str = "schedule"
) -> Schedule:
    """Read torch's CSV: the inverse of `to_torch_csv`, an O at the end of each row.

    Empty cells and transfers are passed over: when jobs run and what they send follows
    from their order. A sum of gradients is awaited before the next W of its chunk, and
    before O.

    Args:
        text: one row a rank.
        name: of the schedule, for people.
        source: names the text in errors.

    Raises:
        RequestError: a cell is none of torch's, or the rows are no valid schedule.

    >>> from_torch_csv("0F0,0I0,0W0\\n").orders[0][1]
    Pass(kind=<PassKind.B: 'B'>, chunk=0, microbatch=0)
    """
    rows = [
        [
            job
            for column, cell in enumerate(row)
            for job in _jobs(cell, f"{source}: row {stage}, column {column}")
        ]
        for stage, row in enumerate(csv.reader(text.strip().splitlines()))
    ]
    parts = [[part for job in row for part in members_of(job)] for row in rows]
    stage_of = {place_of(part): s for s, row in enumerate(parts) for part in row}
    missing = sorted(set(range(len(stage_of))) - set(stage_of))
    if missing or not stage_of:
        raise RequestError(
            f"{source}: no rank runs chunk {missing[0] if missing else 0}; a file has "
            "one row a rank and one cell a pass, such as 2F0"
        )
    try:
        return Schedule(
            name,
            Placement(tuple(stage_of[chunk] for chunk in sorted(stage_of))),
            1
            + max(
                (j.microbatch for row in parts for j in row if isinstance(j, Pass)),
                default=-1,
            ),
            tuple((*_awaited(row), Step(stage)) for stage, row in enumerate(rows)),
        )
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from None
    except RequestError as error:
        raise RequestError(f"{source}: {error}") from None


def _awaited(row: Sequence[Job]) -> list[Job]:
    """Put REDUCE_WAITs where torch has none."""
    jobs: list[Job] = []
    running: list[int] = []
    for job in row:
        for part in members_of(job):
            chunk = place_of(part)
            if chunk in running and part.kind in _WEIGHTS:
                running.remove(chunk)
                jobs.append(Collective(CollectiveKind.REDUCE_WAIT, chunk))
            if part.kind is CollectiveKind.REDUCE_GRAD:
                running.append(chunk)
        jobs.append(job)
    return [*jobs, *(Collective(CollectiveKind.REDUCE_WAIT, c) for c in running)]


def _jobs(cell: str, place: str) -> Iterator[Pass | Pair | Collective]:
    """The job of a cell; none of a transfer."""
    cell = cell.strip()
    if not cell or _TRANSFER.fullmatch(cell):
        return
    if collective := _COLLECTIVE.fullmatch(cell):
        yield Collective(CollectiveKind(collective[2]), int(collective[1]))
        return
    if pair := _PAIR.fullmatch(cell):
        forward, backward = (_pass(part, place) for part in pair.groups())
        yield Pair(forward, backward)
        return
    yield _pass(cell, place)


def _pass(cell: str, place: str) -> Pass:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise RequestError(
            f"{place} (counted from 0): {cell!r} is no job of torch's; "
            " it writes <chunk><F|I|W|B><micro-batch> such as 2F0"
        )
    return Pass(_KIND[match[2]], int(match[1]), int(match[3]))


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
