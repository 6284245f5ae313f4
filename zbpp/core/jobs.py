"""What a stage can be told to do, and what each pass reads and writes.

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
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

__all__ = [
    "Check",
    "Job",
    "Pass",
    "PassKind",
    "Step",
    "Value",
    "What",
    "reads",
    "writes",
]


class PassKind(StrEnum):
    """What a pass computes, in the paper's letters (torch calls B "I" and BW "B")."""

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


Job = Pass | Step | Check


class What(StrEnum):
    """The four arrows of the picture above."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    SAVED = "saved"
    DEFERRED = "deferred"


@dataclass(frozen=True, slots=True)
class Value:
    """What one pass hands to another, named by its producer's chunk and micro-batch."""

    what: What
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.what} of chunk {self.chunk}, micro-batch {self.microbatch}"


def reads(job: Pass, n_chunks: int) -> tuple[Value, ...]:
    """List the values that a pass needs before it can start."""
    chunk, i = job.chunk, job.microbatch
    match job.kind:
        case PassKind.F:
            return (Value(What.ACTIVATION, chunk - 1, i),) if chunk > 0 else ()
        case PassKind.B | PassKind.BW:
            saved = Value(What.SAVED, chunk, i)
            if chunk == n_chunks - 1:
                return (saved,)
            return (saved, Value(What.GRADIENT, chunk + 1, i))
        case PassKind.W:
            return (Value(What.DEFERRED, chunk, i),)
        case _:
            assert_never(job.kind)


def writes(job: Pass, n_chunks: int) -> tuple[Value, ...]:
    """List the values that a pass makes available when it ends."""
    chunk, i = job.chunk, job.microbatch
    match job.kind:
        case PassKind.F:
            saved = Value(What.SAVED, chunk, i)
            if chunk == n_chunks - 1:
                return (saved,)
            return (saved, Value(What.ACTIVATION, chunk, i))
        case PassKind.B:
            deferred = Value(What.DEFERRED, chunk, i)
            if chunk == 0:
                return (deferred,)
            return (deferred, Value(What.GRADIENT, chunk, i))
        case PassKind.BW:
            return (Value(What.GRADIENT, chunk, i),) if chunk > 0 else ()
        case PassKind.W:
            return ()
        case _:
            assert_never(job.kind)
