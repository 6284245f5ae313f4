"""The kinds of jobs, as rows of one table, and the values that jobs pass on.

A model is cut into chunks 0, 1, 2, ... in forward order. On one micro-batch:

    F(0) --activation--> F(1) --activation--> F(2)      forward
      |                    |                    |
    saved                saved                saved     the autograd graph
      v                    v                    v
    B(0) <--gradient---- B(1) <--gradient---- B(2)      input gradient
      |                    |                    |
   deferred             deferred             deferred   operands of the weight matmul
      v                    v                    v
    W(0)                 W(1)                 W(2)      weight gradient

Every order constraint, send and receive follows from these arrows.

Where several processes run the same stage (data parallelism), they gather parameters
and add up gradients between the passes, by separate jobs:

    0UNSHARD 0F0 .. 0B3 0RESHARD .. 0W3 0REDUCE_GRAD .. 0REDUCE_WAIT O

Where a pass exchanges data with other processes in between, as the layers of a mixture
of experts do, its parts occupy one lane each, and parts of other passes run meanwhile
(`Part`):

    compute  0F0.0          0F0.2 0F1.0          0F1.2
    network        0F0.1~               0F1.1~

`KINDS` lists all facts of a kind for the other packages: what it reads and writes, its
time and memory, and the lane of its stage that it occupies. A new kind is a row there,
and a class only if chunk, micro-batch or stage do not identify its jobs.
"""

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import repeat
from typing import ClassVar, TypeVar

from zbpp.core.errors import RequestError

_T = TypeVar("_T")


class PassKind(StrEnum):
    """Computation of a pass, in the paper's letters (torch: B is "I", BW is "B").

    There is a job for each micro-batch on each chunk: ``3BW7``.
    """

    F = "F"
    """Forward."""
    B = "B"
    """Gradient with respect to the chunk's input."""
    W = "W"
    """Gradient with respect to the chunk's weights."""
    BW = "BW"
    """B and W in one call: the input gradient leaves only when W is done too."""


class CollectiveKind(StrEnum):
    """Work of the replicas of a chunk, in torch's words: ``3UNSHARD``."""

    UNSHARD = "UNSHARD"
    """Start to gather the chunk's parameters; F, B and BW need them, W does not."""
    RESHARD = "RESHARD"
    """Free the gathered parameters."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Start to add up the chunk's gradients (all-reduce or reduce-scatter)."""
    REDUCE_WAIT = "REDUCE_WAIT"
    """Wait for that sum; torch has no job for it."""


class StageKind(StrEnum):
    """Work of the optimizer, for all chunks of a stage at once: ``O``."""

    STEP = "O"
    """The optimizer step."""
    CHECK = "V"
    """The validation of the step of the iteration before."""


class PairKind(StrEnum):
    """Two passes of a stage at the same time: ``(0F4;3BW1)OVERLAP_F_B``."""

    FB = "OVERLAP_F_B"
    """A forward that overlaps with another micro-batch's backward, in torch's word."""


Kind = PassKind | CollectiveKind | StageKind | PairKind
"""A kind of any job."""


class Lane(StrEnum):
    """Resources of a stage that a job occupies, one job at a time."""

    COMPUTE = "compute"
    NETWORK = "network"


class What(StrEnum):
    """The four arrows of the picture above."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    SAVED = "saved"
    DEFERRED = "deferred"


_TO_READER = {What.ACTIVATION: 1, What.GRADIENT: -1, What.SAVED: 0, What.DEFERRED: 0}
"""Chunks from the writer of a value to its reader."""


class State(StrEnum):
    """Conditions that jobs wait for, other than values of micro-batches."""

    PARAMETERS = "gathered parameters"
    """The chunk's parameters are gathered: its last UNSHARD, if any, has ended."""
    GRADIENTS = "gradients"
    """The chunk has gradients that no REDUCE_GRAD has begun to add up."""
    SUM = "sum of gradients"
    """The gradients of the chunk are added up: its last REDUCE_GRAD has ended."""
    ALL_GRADIENTS = "all gradients"
    """The last weight gradient of every stage is there, and added up."""
    VERDICT = "verdict"
    """The norms of the iteration before, summed up over the stages."""


@dataclass(frozen=True)
class JobKind:
    """A kind of job: a row of `KINDS`.

    Args:
        summary: a line for people.
        work: the passes, of F, B and W, that it computes for its micro-batch.
        reads: values that it needs before it starts.
        writes: values that are there when it ends.
        awaits: states that it needs before it starts.
        sets: the state that is there when it ends.
        ends: a state that it needs, and that is not there any more when it starts.
        lanes: what it occupies until it ends. Where compute is not one of them it only
            starts something: the stage continues at once, and jobs that await the state
            that it sets wait for its end.
        ends_gradients: a Step waits for it.
        times: columns of `ChunkCosts` whose sum is its time.
        keeps: columns of `ChunkCosts` with the sign by which it changes the memory
            after it.
        peak: column of `ChunkCosts` with the most that it adds while it runs to the
            memory before it; None: nothing.
        torch: text of the same in torch's CSV files; None: torch has none like it.
        colour: in pictures, of those by Okabe and Ito, which people with any colour
            vision can tell apart; None: it takes no time.
    """

    summary: str
    work: tuple[PassKind, ...] = ()
    reads: tuple[What, ...] = ()
    writes: tuple[What, ...] = ()
    awaits: tuple[State, ...] = ()
    sets: State | None = None
    ends: State | None = None
    lanes: tuple[Lane, ...] = (Lane.COMPUTE,)
    ends_gradients: bool = False
    times: tuple[str, ...] = ()
    keeps: tuple[tuple[str, int], ...] = ()
    peak: str | None = None
    torch: str | None = None
    colour: str | None = None

    @property
    def is_async(self) -> bool:
        """True if it continues while its stage runs the next job."""
        return Lane.COMPUTE not in self.lanes


_F, _B, _W, _BW = PassKind
_UNSHARD, _RESHARD, _REDUCE_GRAD, _REDUCE_WAIT = CollectiveKind

KINDS: Mapping[Kind, JobKind] = {
    _F: JobKind(
        "forward",
        work=(_F,),
        reads=(What.ACTIVATION,),
        writes=(What.SAVED, What.ACTIVATION),
        awaits=(State.PARAMETERS,),
        times=("f",),
        keeps=(("m_b", 1),),
        peak="peak_f",
        torch="F",
        colour="#0072B2",
    ),
    _B: JobKind(
        "input gradient",
        work=(_B,),
        reads=(What.SAVED, What.GRADIENT),
        writes=(What.DEFERRED, What.GRADIENT),
        awaits=(State.PARAMETERS,),
        times=("b",),
        keeps=(("m_w", 1), ("m_b", -1)),
        peak="peak_b",
        torch="I",
        colour="#E69F00",
    ),
    _W: JobKind(
        "weight gradient",
        work=(_W,),
        reads=(What.DEFERRED,),
        sets=State.GRADIENTS,
        ends_gradients=True,
        times=("w",),
        keeps=(("m_w", -1),),
        peak="peak_w",
        torch="W",
        colour="#009E73",
    ),
    _BW: JobKind(
        "both gradients",
        work=(_B, _W),
        reads=(What.SAVED, What.GRADIENT),
        writes=(What.GRADIENT,),
        awaits=(State.PARAMETERS,),
        sets=State.GRADIENTS,
        ends_gradients=True,
        times=("b", "w"),
        keeps=(("m_b", -1),),
        peak="peak_bw",
        torch="B",
        colour="#D55E00",
    ),
    _UNSHARD: JobKind(
        "gathers parameters",
        sets=State.PARAMETERS,
        lanes=(Lane.NETWORK,),
        times=("all_gather",),
        torch="UNSHARD",
        colour="#56B4E9",
    ),
    _RESHARD: JobKind(
        "free gathered parameters",
        ends=State.PARAMETERS,
        torch="RESHARD",
    ),
    _REDUCE_GRAD: JobKind(
        "adds gradients up",
        sets=State.SUM,
        ends=State.GRADIENTS,
        lanes=(Lane.NETWORK,),
        times=("reduce_scatter",),
        torch="REDUCE_GRAD",
        colour="#8C6D31",
    ),
    _REDUCE_WAIT: JobKind(
        "wait for the sum of gradients",
        awaits=(State.SUM,),
        ends=State.SUM,
        ends_gradients=True,
    ),
    StageKind.STEP: JobKind(
        "optimizer step",
        awaits=(State.ALL_GRADIENTS,),
        times=("optimizer",),
        peak="peak_o",
        colour="#F0E442",
    ),
    StageKind.CHECK: JobKind(
        "validation of the last step",
        awaits=(State.VERDICT,),
        times=("validation",),
        colour="#CC79A7",
    ),
    PairKind.FB: JobKind(
        "forward and backward, overlapped",
        lanes=(Lane.COMPUTE, Lane.NETWORK),
        times=("fb",),
        torch="OVERLAP_F_B",
        colour="#7B5EA7",
    ),
}
"""Every kind of job."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One computation of one chunk on one micro-batch.

    >>> str(Pass(PassKind.B, chunk=3, microbatch=7))
    '3B7'
    """

    kind: PassKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Collective:
    """One job of all replicas of a chunk.

    >>> str(Collective(CollectiveKind.UNSHARD, chunk=3))
    '3UNSHARD'
    """

    kind: CollectiveKind
    chunk: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}"


@dataclass(frozen=True, slots=True)
class Step:
    """The optimizer step of one stage, written ``O``."""

    stage: int
    kind: ClassVar = StageKind.STEP

    def __str__(self) -> str:
        return "O"


@dataclass(frozen=True, slots=True)
class Check:
    """The validation of the previous iteration's step, written ``V``."""

    stage: int
    kind: ClassVar = StageKind.CHECK

    def __str__(self) -> str:
        return "V"


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward of other micro-batches of a stage, at the same time.

    >>> str(Pair(Pass(PassKind.F, 0, 4), Pass(PassKind.BW, 3, 1)))
    '(0F4;3BW1)OVERLAP_F_B'

    Raises:
        RequestError: they are other passes.
    """

    forward: Pass
    backward: Pass
    kind: ClassVar = PairKind.FB

    def __post_init__(self) -> None:
        if self.forward.kind is not _F or self.backward.kind not in (_B, _BW):
            raise RequestError(f"{self} is no pair of an F and a B or BW")

    def __str__(self) -> str:
        return f"({self.forward};{self.backward}){self.kind}"


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a pass, which occupies one lane; a ``~`` marks the network.

    >>> str(Part(Pass(PassKind.F, 0, 4), 1, Lane.NETWORK))
    '0F4.1~'
    """

    of: Pass
    index: int
    lane: Lane

    @property
    def kind(self) -> PassKind:
        """Kind of the pass that this is a part of."""
        return self.of.kind

    @property
    def chunk(self) -> int:
        """Chunk of the pass that this is a part of."""
        return self.of.chunk

    def __str__(self) -> str:
        return f"{self.of}.{self.index}{'~' if self.lane is Lane.NETWORK else ''}"


Job = Pass | Step | Check | Collective | Pair | Part
"""Anything that has a place in the order of a stage."""


def kind_of(job: Job) -> JobKind:
    """The row of a job's kind."""
    return KINDS[job.kind]


def lanes_of(job: Job) -> tuple[Lane, ...]:
    """The lanes of its stage that a job occupies."""
    return (job.lane,) if isinstance(job, Part) else KINDS[job.kind].lanes


def place_of(job: Job) -> int:
    """The chunk of a job, or its stage if it is for all chunks of the stage."""
    match job:
        case Step(stage) | Check(stage):
            return stage
        case Pair(forward):
            return forward.chunk
    return job.chunk


def passes_in(job: object) -> tuple[Pass, ...]:
    """The passes that a job, or an instruction, consists of; () if it computes none.

    A part has the pass that it belongs to.

    >>> passes_in(Pass(PassKind.F, 0, 0)), passes_in(Step(0))
    ((Pass(kind=<PassKind.F: 'F'>, chunk=0, microbatch=0),), ())
    """
    match job:
        case Pass():
            return (job,)
        case Pair(forward, backward):
            return forward, backward
        case Part(of):
            return (of,)
    return ()


def members_of(job: Job) -> tuple[Job, ...]:
    """The jobs that run at the same time in a job: its passes, or itself."""
    return passes_in(job) or (job,)


def bulk_construct(cls: type[_T], n: int, /, **fields: Iterable[object]) -> list[_T]:
    """Make n objects of a frozen dataclass with slots, in half the time of its calls.

    >>> bulk_construct(Step, 2, stage=[0, 1])
    [Step(stage=0), Step(stage=1)]
    """
    objects = list(map(object.__new__, repeat(cls, n)))
    for name, values in fields.items():
        deque(map(vars(cls)[name].__set__, objects, values), maxlen=0)
    return objects


@contextmanager
def gc_paused() -> Iterator[None]:
    """Make many objects that stay without a look for circles among them now and then.

    It takes a third of the time of millions of jobs, and there are no circles.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def passes(kind: PassKind, chunk: int, n_microbatches: int) -> list[Pass]:
    """Return a pass of each micro-batch.

    >>> passes(PassKind.B, 3, 2) == [Pass(PassKind.B, 3, 0), Pass(PassKind.B, 3, 1)]
    True
    """
    n = n_microbatches
    return bulk_construct(
        Pass, n, kind=repeat(kind), chunk=repeat(chunk), microbatch=range(n)
    )


@dataclass(frozen=True, slots=True)
class Value:
    """Data handed from pass to pass, named by its producer's chunk and micro-batch."""

    what: What
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.what} of chunk {self.chunk}, micro-batch {self.microbatch}"


def reader(value: Value) -> int:
    """Return the chunk that reads a value: each value has one reader.

    >>> reader(Value(What.ACTIVATION, chunk=2, microbatch=0))
    3
    """
    return value.chunk + _TO_READER[value.what]


@lru_cache(maxsize=2**16)  # planners replay the same passes over and over
def reads(job: Pass, n_chunks: int) -> tuple[Value, ...]:
    """List the values that a pass needs before it can start."""
    producers = [(what, job.chunk - _TO_READER[what]) for what in KINDS[job.kind].reads]
    return tuple(
        Value(what, chunk, job.microbatch)
        for what, chunk in producers
        if 0 <= chunk < n_chunks
    )


@lru_cache(maxsize=2**16)
def writes(job: Pass, n_chunks: int) -> tuple[Value, ...]:
    """List the values that a pass makes available when it ends."""
    return tuple(
        Value(what, job.chunk, job.microbatch)
        for what in KINDS[job.kind].writes
        if 0 <= job.chunk + _TO_READER[what] < n_chunks
    )


def input_of(job: Pass, n_chunks: int) -> Value | None:
    """Return the value that a pass takes from another chunk, None if there is none."""
    return next((v for v in reads(job, n_chunks) if v.chunk != job.chunk), None)


def output_of(job: Pass, n_chunks: int) -> Value | None:
    """Return the value that a pass has for another chunk, None if there is none."""
    return next((v for v in writes(job, n_chunks) if reader(v) != v.chunk), None)
