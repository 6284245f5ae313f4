"""Take an optimizer step that can be rolled back to the bit.

    Deferred   O   step p with a temporary copy of the state (m, v, step)
               V   valid: step a copy of the old p with the state itself
                   invalid: copy the old p back; the state was never touched
    Snapshot   O   step; there is a copy of p and the state as they were
               V   valid: nothing, or copy what will be the old state of the next step
                   invalid: put both back

What follows a valid step may be done in slices at any time before the next gradients.

Deferred keeps one copy of the parameters, which its second step brings up to date. It
asks for an optimizer that treats every parameter by itself, as torch's do: the same
numbers come out of both steps, and of a step on a few parameters at a time, which is
all the temporary state that there is. Arithmetic inverses of a step do not give the
bits back, and none can take an Inf out of m.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from zbpp.runtime.optim.param_groups import copy_groups
from zbpp.runtime.optim.rollback.buckets import (
    Piece,
    cut_into_buckets,
    treats_parameters_apart,
)
from zbpp.runtime.optim.rollback.copies import Copies, Scratch, State
from zbpp.runtime.support.marks import Mark, mark
from zbpp.runtime.support.torch_internals import has_plain_step, plain_step

__all__ = ["RecomputeRollback", "Rollback", "can_defer"]


class Rollback(Protocol):
    """A speculative step: `speculate`, then `commit` or `undo`."""

    def speculate(self) -> None:
        """Step on the gradients as they are."""

    def commit(self) -> Iterator[None]:
        """The step is valid; each item is a slice of what is left to do."""

    def undo(self) -> None:
        """The step is invalid; may be called more than once."""

    def forget(self) -> None:
        """Others may write to parameters and state now."""


def can_defer(optimizer: torch.optim.Optimizer) -> bool:
    """True if `RecomputeRollback` can roll back a step of this optimizer."""
    return treats_parameters_apart(optimizer) and has_plain_step(optimizer)


class RecomputeRollback:
    """One more copy of the parameters; the step is computed twice.

    Args:
        optimizer: one that `can_defer`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._copies = Copies()
        self._values: list[State] = []
        self._left: deque[list[Piece]] = deque()
        self._stepped: dict[Tensor, Mark] = {}

    @torch.no_grad()
    def speculate(self) -> None:
        """Step, with the state left as it is."""
        self._values = copy_groups(self._optimizer)
        self._left = deque(cut_into_buckets(self._optimizer))
        self._stepped = {}
        scratch = Scratch()
        try:
            for bucket in self._left:
                for piece in bucket:
                    if piece.first:
                        self._copies.take(piece.parameter)
                        if piece.whole is not None:  # the first step was on all of it
                            self._copies.drop(piece.whole)
                        self._stepped[piece.parameter] = None
                self._step_on_copies(bucket, scratch)
        except BaseException:
            self.undo()  # as if the step had been left to V
            raise
        self._stepped = {parameter: mark(parameter) for parameter in self._stepped}

    def _step_on_copies(self, bucket: Sequence[Piece], scratch: Scratch) -> None:
        held = self._optimizer.state
        states = [
            scratch.copy(piece.of_state(piece.state_in(held))) for piece in bucket
        ]
        self._step(bucket, [piece.of(piece.parameter) for piece in bucket], states)
        scratch.reuse()

    @torch.no_grad()
    def commit(self) -> Iterator[None]:
        """Step the state: on the old parameters, which end as the new ones."""
        while self._left:
            yield
            self._commit(self._left[0])
            self._left.popleft()

    def _commit(self, bucket: Sequence[Piece]) -> None:
        real = self._optimizer.state
        held = [piece.state_in(real) for piece in bucket]
        states = [
            piece.of_state(state) for piece, state in zip(bucket, held, strict=True)
        ]
        copies = [piece.of(self._copies.of(piece.parameter)) for piece in bucket]
        stepped = self._step(bucket, copies, states)
        for piece, copy, state in zip(bucket, copies, held, strict=True):
            parameter = piece.parameter
            if piece.cut is None and piece.whole is None:
                real[parameter] = stepped[copy]
            elif piece.last:
                for name, value in state.items():
                    new = stepped[copy][name]
                    if new is not value and not piece.is_cut_in(value):
                        value.copy_(new)
            if piece.last:
                self._copies.trust(parameter, self._stepped[parameter])

    @torch.no_grad()
    def undo(self) -> None:
        """Put the parameters back; the state was never touched."""
        self._left.clear()
        for parameter in self._stepped:
            parameter.copy_(self._copies.of(parameter))

    def forget(self) -> None:
        """Copy all parameters anew in the next step."""
        self._copies.forget()

    def _step(
        self,
        bucket: Sequence[Piece],
        targets: Sequence[Tensor],
        states: Sequence[State],
    ) -> Mapping[Tensor, State]:
        """Step stand-ins of some parameters, with a state of their own."""
        optimizer = self._optimizer
        groups, held = optimizer.param_groups, optimizer.state
        members: dict[int, list[Tensor]] = defaultdict(list)
        used: defaultdict[Tensor, State] = defaultdict(dict)
        for piece, target, state in zip(bucket, targets, states, strict=True):
            members[piece.group].append(target)
            if target is not piece.held:
                target.grad = piece.of(piece.gradient)
            if state:
                used[target] = state
        optimizer.param_groups = [
            {**self._values[number], "params": own} for number, own in members.items()
        ]
        optimizer.state = used
        try:
            plain_step(optimizer)
        finally:
            optimizer.param_groups, optimizer.state = groups, held
            for piece, target in zip(bucket, targets, strict=True):
                if target is not piece.held:
                    target.grad = None
        return used
