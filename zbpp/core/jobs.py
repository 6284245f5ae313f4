"""The jobs of a stage, and the values that each pass reads and writes.

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

Where several processes hold the same stage (data parallelism), they gather parameters
and add up gradients between the passes, by jobs of their own:

    0UNSHARD 0F0 .. 0B3 0RESHARD .. 0W3 0REDUCE_GRAD .. 0REDUCE_WAIT O
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import repeat
from typing import TypeVar, assert_never

__all__ = [
    "Check",
    "Collective",
    "CollectiveKind",
    "Job",
    "Pass",
    "PassKind",
    "Step",
    "Value",
    "What",
    "input_of",
    "many",
    "output_of",
    "passes",
    "reader",
    "reads",
    "writes",
]


class PassKind(StrEnum):
    """Computation of a pass, in the paper's letters (torch: B is "I", BW is "B")."""

    F = "F"
    """Forward."""
    B = "B"
    """Gradient with respect to the chunk's input."""
    W = "W"
    """Gradient with respect to the chunk's weights."""
    BW = "BW"
    """B and W in one call: the input gradient leaves only when W is done too."""


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


_T = TypeVar("_T")


def many(made_of: type[_T], n: int, /, **fields: Iterable[object]) -> list[_T]:
    """Make n objects of a frozen dataclass with slots, in half the time of its calls.

    Args:
        made_of: the class.
        n: their number.
        fields: of each field a value for every object; further ones are not looked at.

    >>> many(Step, 2, stage=[0, 1])
    [Step(stage=0), Step(stage=1)]
    """
    made = list(map(object.__new__, repeat(made_of, n)))
    for name, values in fields.items():
        deque(map(vars(made_of)[name].__set__, made, values), maxlen=0)
    return made


def passes(kind: PassKind, chunk: int, n_microbatches: int) -> list[Pass]:
    """Return a pass of each micro-batch.

    >>> passes(PassKind.B, 3, 2) == [Pass(PassKind.B, 3, 0), Pass(PassKind.B, 3, 1)]
    True
    """
    n = n_microbatches
    return many(Pass, n, kind=repeat(kind), chunk=repeat(chunk), microbatch=range(n))


@dataclass(frozen=True, slots=True)
class Step:
    """The optimizer step of one stage, written ``O``."""

    stage: int

    def __str__(self) -> str:
        return "O"


@dataclass(frozen=True, slots=True)
class Check:
    """The validation of the previous iteration's step, written ``V``."""

    stage: int

    def __str__(self) -> str:
        return "V"


class CollectiveKind(StrEnum):
    """Work of the processes that hold the same chunk, in torch's words."""

    UNSHARD = "UNSHARD"
    """Start to gather the chunk's parameters; F, B and BW need them, W does not."""
    RESHARD = "RESHARD"
    """Free the gathered parameters."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Start to add up the chunk's gradients (all-reduce or reduce-scatter)."""
    REDUCE_WAIT = "REDUCE_WAIT"
    """Wait for that sum; torch has no job for it."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One such job of one chunk. UNSHARD and REDUCE_GRAD go on beside other jobs.

    >>> str(Collective(CollectiveKind.UNSHARD, chunk=3))
    '3UNSHARD'
    """

    kind: CollectiveKind
    chunk: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}"

    @property
    def goes_on(self) -> bool:
        """True if it only starts here, and goes on while other jobs run."""
        return self.kind in (CollectiveKind.UNSHARD, CollectiveKind.REDUCE_GRAD)


Job = Pass | Step | Check | Collective


class What(StrEnum):
    """The four arrows of the picture above."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    SAVED = "saved"
    DEFERRED = "deferred"


@dataclass(frozen=True, slots=True)
class Value:
    """Data handed from pass to pass, named by its producer's chunk and micro-batch."""

    what: What
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.what} of chunk {self.chunk}, micro-batch {self.microbatch}"


def input_of(job: Pass, n_chunks: int) -> Value | None:
    """Return the value that a pass takes from another chunk, None if there is none."""
    chunk, kind = job.chunk, job.kind
    if kind is PassKind.F:
        return Value(What.ACTIVATION, chunk - 1, job.microbatch) if chunk > 0 else None
    if kind is PassKind.W or chunk == n_chunks - 1:
        return None
    return Value(What.GRADIENT, chunk + 1, job.microbatch)


def output_of(job: Pass, n_chunks: int) -> Value | None:
    """Return the value that a pass has for another chunk, None if there is none."""
    chunk, kind = job.chunk, job.kind
    if kind is PassKind.F:
        if chunk == n_chunks - 1:
            return None
        return Value(What.ACTIVATION, chunk, job.microbatch)
    if kind is PassKind.W or chunk == 0:
        return None
    return Value(What.GRADIENT, chunk, job.microbatch)


def reader(value: Value) -> int:
    """Return the chunk that reads a value: each value has one reader.

    >>> reader(Value(What.ACTIVATION, chunk=2, microbatch=0))
    3
    """
    match value.what:
        case What.ACTIVATION:
            return value.chunk + 1
        case What.GRADIENT:
            return value.chunk - 1
        case What.SAVED | What.DEFERRED:
            return value.chunk
        case _:
            assert_never(value.what)


@lru_cache(maxsize=2**16)  # planners replay the same passes over and over
def reads(job: Pass, n_chunks: int) -> tuple[Value, ...]:
    """List the values that a pass needs before it can start."""
    if job.kind is PassKind.W:
        return (Value(What.DEFERRED, job.chunk, job.microbatch),)
    value = input_of(job, n_chunks)
    if job.kind is PassKind.F:
        return () if value is None else (value,)
    saved = Value(What.SAVED, job.chunk, job.microbatch)
    return (saved,) if value is None else (saved, value)


@lru_cache(maxsize=2**16)
def writes(job: Pass, n_chunks: int) -> tuple[Value, ...]:
    """List the values that a pass makes available when it ends."""
    if job.kind is PassKind.W:
        return ()
    value = output_of(job, n_chunks)
    if job.kind is PassKind.BW:
        return () if value is None else (value,)
    what = What.SAVED if job.kind is PassKind.F else What.DEFERRED
    kept = Value(what, job.chunk, job.microbatch)
    return (kept,) if value is None else (kept, value)
