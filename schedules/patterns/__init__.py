"""Hand-made orders, with a picture and the formula of each at the top of its file.

They depend on the size of the pipeline alone. Begin with `one_chunk`; `interleaved` and
`waves` have several chunks a stage. All are written in phases: so many times some
cells, each a kind and a chunk.

    (2, [F0]), (2, [F0, BW0]), (2, [BW0])      0F0 0F1 0F2 0BW0 0F3 0BW1 0BW2 0BW3

The n-th F of a chunk is that of micro-batch n, and so is the n-th B or BW. A W belongs
to the first B of its chunk, or of all chunks (None), that has had none.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from zbpp.core import Job, Pair, Pass, PassKind, Placement, Schedule, Step

F, B, W, BW = PassKind

Cell: TypeAlias = "tuple[PassKind, int | None]"

Phases: TypeAlias = "Iterable[tuple[int, Sequence[Cell | tuple[Cell, Cell]]]]"
"""Times and cells; two cells together are a pair."""


def in_phases(
    name: str,
    placement: Placement,
    n_microbatches: int,
    phases: Callable[[int], Phases],
    *,
    least: int = 0,
) -> Schedule:
    """Make a schedule of the phases of each stage; it steps at its end.

    If there are fewer micro-batches than the phases need, ``least``, some of negative
    number stand in front. They are left out: what remains of a valid schedule is valid.
    """
    first = min(0, n_microbatches - least)
    orders = tuple(
        (*_jobs(phases(stage), first), Step(stage))
        for stage in range(placement.n_stages)
    )
    return Schedule(name, placement, n_microbatches, orders)


def _jobs(phases: Phases, first: int) -> Iterator[Job]:
    done: Counter[tuple[bool, int | None]] = Counter()
    put_off: list[Pass] = []

    def run(kind: PassKind, chunk: int | None) -> Pass:
        if kind is W:
            index = next(i for i, b in enumerate(put_off) if chunk in (None, b.chunk))
            b = put_off.pop(index)
            return Pass(W, b.chunk, b.microbatch)
        assert chunk is not None
        job = Pass(kind, chunk, first + done[kind is F, chunk])
        done[kind is F, chunk] += 1
        if kind is B:
            put_off.append(job)
        return job

    for times, cells in phases:
        for _ in range(times):
            for cell in cells:
                pair = cell if isinstance(cell[0], tuple) else (cell,)
                passes = [run(*each) for each in pair]
                passes = [x for x in passes if x.microbatch >= 0]
                yield from [Pair(*passes)] if len(passes) == 2 else passes
