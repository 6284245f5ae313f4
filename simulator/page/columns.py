"""A timeline as columns of numbers, compressed: small in a page, and nothing lost.

One number a job in each column, stage after stage. Times and memories are doubles; of
each, the page holds what differs from a guess, as bits (exclusive or): most guesses are
right, and zeros compress well.

    column       type      guess
    start        f64       the end of the job before on the stage
    end          f64       start, and as long as the last such job of the chunk
    during       f64       the one before; most memory that the stage holds in the job
    after        f64       the one before; memory that it holds from the end on
    source       i32       number of the job whose message it awaits, less its own; or 0
    microbatch   i32       -1 for O and V
    chunk        i32       the same
    kind         u8        place in ``KINDS``

Collectives, of which there are few, are plain lists: stage, kind, chunk, start, end;
``sending`` is that of `Timeline`.

The bytes of numbers are sorted by their place (all first bytes, all second ones, ...),
deflated, and written in base64.
"""

import base64
import sys
import zlib
from array import array
from collections.abc import Mapping
from itertools import accumulate, islice
from operator import xor
from typing import Any

from zbpp.core import (
    Check,
    Collective,
    CollectiveKind,
    Job,
    MemoryModel,
    Pass,
    PassKind,
    Placement,
    Slot,
    Step,
    Timeline,
    held_during,
)
from zbpp.simulator.messages import messages
from zbpp.simulator.palette import letter_of

__all__ = ["KINDS", "decode", "encode", "read_columns"]

KINDS = ("F", "B", "W", "BW", "O", "V")
_DOUBLES = ("start", "end", "during", "after")
_INTEGERS = ("source", "microbatch", "chunk")


def encode(timeline: Timeline, memory: MemoryModel | None = None) -> dict[str, Any]:
    """Write a timeline, with memory if a model is given, as values for JSON.

    Raises:
        RequestError: the memory does not fit the placement.
    """
    columns = _columns(timeline, memory)
    planes = b"".join(map(_sorted_bytes, columns.values()))
    return {
        "placement": list(timeline.placement.stage_of),
        "microbatches": timeline.n_microbatches,
        "jobs": [len(row) for row in timeline.rows],
        "recomputing": sorted(timeline.recomputing),
        "sending": list(timeline.sending),
        "collectives": [
            [stage, str(slot.job.kind), slot.job.chunk, slot.start, slot.end]
            for stage, lane in enumerate(timeline.collectives)
            for slot in lane
            if isinstance(slot.job, Collective)
        ],
        "columns": base64.b64encode(zlib.compress(planes, 9)).decode("ascii"),
    }


def decode(data: Mapping[str, Any], name: str = "") -> Timeline:
    """Read a timeline from a page: equal, to the last bit, to the one written."""
    columns = read_columns(data)
    slots = zip(
        *(columns[key] for key in ("kind", "chunk", "microbatch", "start", "end")),
        strict=True,
    )
    rows = [
        tuple(
            Slot(_job(KINDS[kind], stage, chunk, number), start, end)
            for kind, chunk, number, start, end in islice(slots, count)
        )
        for stage, count in enumerate(data["jobs"])
    ]
    return Timeline(
        name,
        Placement(tuple(data["placement"])),
        data["microbatches"],
        tuple(rows),
        frozenset(data["recomputing"]),
        collectives=_lanes(data),
        sending=tuple(data["sending"]),
    )


def _lanes(data: Mapping[str, Any]) -> tuple[tuple[Slot, ...], ...]:
    lanes: list[list[Slot]] = [[] for _ in data["jobs"]]
    for stage, kind, chunk, start, end in data["collectives"]:
        lanes[stage].append(Slot(Collective(CollectiveKind(kind), chunk), start, end))
    return tuple(map(tuple, lanes)) if data["collectives"] else ()


def read_columns(data: Mapping[str, Any]) -> "dict[str, array[Any]]":
    """Read all columns of a timeline from a page, guesses added."""
    counts = data["jobs"]
    raw = _read(zlib.decompress(base64.b64decode(data["columns"])), sum(counts))
    keys = list(zip(raw["kind"], raw["chunk"], strict=True))
    found = {name: array("d") for name in _DOUBLES}
    first = 0
    for count in counts:
        last: dict[tuple[int, int], float] = {}
        before = 0.0
        for i in range(first, first + count):
            start = _corrected(before, raw["start"][i])
            before = _corrected(start + last.get(keys[i], 0.0), raw["end"][i])
            last[keys[i]] = before - start
            found["start"].append(start)
            found["end"].append(before)
        first += count
    for name in ("during", "after"):
        held = 0.0
        for bits in raw[name]:
            held = _corrected(held, bits)
            found[name].append(held)
    return raw | found


def _columns(timeline: Timeline, memory: MemoryModel | None) -> "dict[str, array[Any]]":
    starts, ends = array("d"), array("d")
    start_guesses, end_guesses = array("d"), array("d")
    kinds, chunks, numbers = array("B"), array("i"), array("i")
    for row in timeline.rows:
        last: dict[tuple[str, int], float] = {}
        before = 0.0
        for slot in row:
            job, start = slot.job, slot.start
            chunk, number = -1, -1
            if isinstance(job, Pass):
                chunk, number = job.chunk, job.microbatch
            key = (letter_of(job), chunk)
            start_guesses.append(before)
            end_guesses.append(start + last.get(key, 0.0))
            before = slot.end
            last[key] = before - start
            starts.append(start)
            ends.append(before)
            kinds.append(KINDS.index(key[0]))
            chunks.append(chunk)
            numbers.append(number)
    columns = {
        "start": _differing(starts, start_guesses),
        "end": _differing(ends, end_guesses),
    }
    for name, values in _memory(timeline, memory).items():
        columns[name] = _differing(values, array("d", [0.0, *values[:-1]]))
    columns["source"] = array("i", _sources(timeline))
    return columns | {"microbatch": numbers, "chunk": chunks, "kind": kinds}


def _memory(
    timeline: Timeline, memory: MemoryModel | None
) -> "dict[str, array[float]]":
    n_jobs = sum(map(len, timeline.rows))
    if memory is None:
        return dict.fromkeys(("during", "after"), array("d", [0.0]) * n_jobs)
    of_chunk = memory.on(timeline.placement)
    during: list[float] = []
    after: list[float] = []
    for stage, row in enumerate(timeline.rows):
        jobs = [slot.job for slot in row]
        during += held_during(jobs, of_chunk, stage=stage)
        changes = [of_chunk.change(job) for job in jobs]
        after += list(accumulate(changes, initial=of_chunk.fixed[stage]))[1:]
    return {"during": array("d", during), "after": array("d", after)}


def _sources(timeline: Timeline) -> list[int]:
    firsts = [0, *accumulate(map(len, timeline.rows))]
    found = [0] * firsts[-1]
    for message in messages(timeline):
        source, target = (
            firsts[stage] + index for stage, index in (message.source, message.target)
        )
        found[target] = source - target
    return found


_DOUBLE = array("d", (0.0,))
_BITS = memoryview(_DOUBLE).cast("B").cast("Q")


def _bits(number: float) -> int:
    _DOUBLE[0] = number
    return _BITS[0]


def _differing(values: "array[float]", guesses: "array[float]") -> "array[int]":
    """Bits in which each double differs from its guess."""
    pairs = (memoryview(one).cast("B").cast("Q") for one in (values, guesses))
    return array("Q", map(xor, *pairs))


def _corrected(guess: float, bits: int) -> float:
    """The double that differs from a guess in these bits."""
    _BITS[0] = _bits(guess) ^ bits
    return _DOUBLE[0]


def _sorted_bytes(column: "array[Any]") -> bytes:
    if sys.byteorder == "big":
        column.byteswap()
    data, size = column.tobytes(), column.itemsize
    return b"".join(data[place::size] for place in range(size))


def _read(data: bytes, n_jobs: int) -> "dict[str, array[Any]]":
    columns: dict[str, array[Any]] = {}
    types = dict.fromkeys(_DOUBLES, "Q") | dict.fromkeys(_INTEGERS, "i")
    first = 0
    for name, code in (types | {"kind": "B"}).items():
        column = array(code)
        size = column.itemsize
        block = bytearray(size * n_jobs)
        for place in range(size):
            block[place::size] = data[first : first + n_jobs]
            first += n_jobs
        column.frombytes(bytes(block))
        if sys.byteorder == "big":
            column.byteswap()
        columns[name] = column
    return columns


def _job(kind: str, stage: int, chunk: int, microbatch: int) -> Job:
    if kind == "O":
        return Step(stage)
    return Check(stage) if kind == "V" else Pass(PassKind(kind), chunk, microbatch)
