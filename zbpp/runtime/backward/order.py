"""Add the gradients of a chunk in micro-batch order, whatever the passes' order.

    passes run   B0 B2 B1 W0 W1 W2
    biases       db0,    db1 + db2       what B computes: in the order of the B's
    weights               dW0, dW1, dW2  what W computes: in the order of the W's

A B that comes early has its gradients set aside until its turn; a W waits for its turn.
So all schedules end with the same bits, if a weight waits for W in all micro-batches or
in none.

Gradients that are computed in 16 bits and summed in 32 (`fully_shard`'s policies) are
widened after each addition: within a micro-batch they have 16 bits, over them 32.

Replicas may sum each micro-batch by itself, layer by layer within its W (`Summing`).
Then B's gradients wait for that W, and no gradient is added to those of another one:

    passes run   B0   B1   W0               W1
    summed                 db0 and dW0      db1 and dW1
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from zbpp.runtime.backward.plan import PlanCache
from zbpp.runtime.backward.split import Progress, SplitGraph

__all__ = ["GradientOrder", "Summing"]

Gradients = Sequence[Tensor | None]


class Summing(Progress, ABC):
    """Sums gradients over replicas while W goes on."""

    sums_each: bool
    """Each micro-batch is summed by itself, and its gradients are gone then."""

    @abstractmethod
    def rest(self) -> None:
        """Sum what is there."""


class GradientOrder:
    """Runs B and W of one chunk.

    Args:
        parameters: all of the chunk's.
        widen: called after every addition, before that of another micro-batch.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        widen: Callable[[], None] | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._widen = widen
        self.plans = PlanCache()
        """Of the chunk's graphs."""
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._b, self._w = _Turns(), _Turns()
        self._n_microbatches = 0
        self._progress: Summing | None = None
        self._each: Summing | None = None
        self._n_running_apart = 0
        """B's that run now with gradients set aside: nothing else may be added."""
        self._apart: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Of each micro-batch, what its B has left to its W to add."""

    def listen(self, n_microbatches: int, progress: Summing) -> None:
        """Tell how far the step's last W is, or all, if each is summed by itself."""
        self._n_microbatches, self._progress = n_microbatches, progress
        self._each = progress if progress.sums_each else None

    def run_b(
        self, microbatch: int, graph: SplitGraph, gradients: Gradients
    ) -> tuple[Tensor | None, ...]:
        """B of a micro-batch; see `SplitGraph.backward_input`."""
        if microbatch == self._b.turn and self._each is None:
            found = graph.backward_input(gradients)
            self._end_addition()
            self._b.end_turn()
            return found
        found, apart = self._run_apart(graph, gradients)
        if self._each is not None:
            self._apart[microbatch] = apart
        else:
            self._b.add(microbatch, lambda: self._end_b(apart))
        if not self._n_running_apart:
            self._w.go_on()
        return found

    def _run_apart(
        self, graph: SplitGraph, gradients: Gradients
    ) -> tuple[tuple[Tensor | None, ...], list[tuple[Tensor, Tensor]]]:
        """Run B; return its result, and what parameters would have got from it."""
        before = [(p, p.grad) for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        self._n_running_apart += 1
        try:
            found = graph.backward_input(gradients)
            return found, [(p, p.grad) for p in self._parameters if p.grad is not None]
        finally:
            self._n_running_apart -= 1
            for p, grad in before:
                p.grad = grad

    def run_w(self, microbatch: int, graph: SplitGraph) -> None:
        """W of a micro-batch, or of several whose turn has come."""
        is_free = not self._n_running_apart
        self._w.add(microbatch, lambda: self._do_w(microbatch, graph), now=is_free)

    def _do_w(self, microbatch: int, graph: SplitGraph) -> None:
        each, progress = self._each, None
        if each is not None:
            _add_all(self._apart.pop(microbatch))
        if each is not None or microbatch + 1 == self._n_microbatches:
            progress = self._progress
        graph.backward_weight(progress)
        self._end_addition()
        if each is not None:
            each.rest()

    def begin_w(self, microbatch: int, graph: SplitGraph, n_left: int) -> None:
        """Do a part of W, if it is its turn and nobody hears how far it is.

        Args:
            microbatch: of the graph, whose B may still run.
            graph: of the micro-batch.
            n_left: parts of it that are to come, the last of them by `run_w`.
        """
        is_last = microbatch + 1 == self._n_microbatches
        is_heard = self._each is not None or (self._progress is not None and is_last)
        if not (is_heard or self._n_running_apart) and microbatch == self._w.turn:
            graph.begin_weight(n_left)

    def run_bw(
        self, microbatch: int, graph: SplitGraph, gradients: Gradients
    ) -> tuple[Tensor | None, ...]:
        """BW of a micro-batch: one full backward where it is its turn in both."""
        is_turn = microbatch == self._b.turn == self._w.turn
        if not is_turn or self._each is not None:
            found = self.run_b(microbatch, graph, gradients)
            self.run_w(microbatch, graph)
            return found
        found = graph.backward(gradients)
        self._end_addition()
        self._b.end_turn()
        self._w.end_turn()
        return found

    def _end_b(self, apart: Iterable[tuple[Tensor, Tensor]]) -> None:
        _add_all(apart)
        self._end_addition()

    def _end_addition(self) -> None:
        if self._widen is not None:
            self._widen()


class _Turns:
    """Runs actions in micro-batch order: one that comes early waits for its turn."""

    def __init__(self) -> None:
        self.turn = 0
        self._early: dict[int, Callable[[], None]] = {}

    def add(
        self, microbatch: int, action: Callable[[], None], *, now: bool = True
    ) -> None:
        """Run an action in its turn.

        Args:
            microbatch: its number.
            action: to run.
            now: False leaves it to `go_on`, even if it is its turn.
        """
        self._early[microbatch] = action
        if now:
            self.go_on()

    def end_turn(self) -> None:
        """Go on behind a micro-batch that has run in its turn."""
        self.turn += 1
        if self._early:
            self.go_on()

    def go_on(self) -> None:
        """Run those whose turn it is."""
        while (action := self._early.pop(self.turn, None)) is not None:
            action()
            self.turn += 1


@torch.no_grad()
def _add_all(apart: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add gradients that were set aside."""
    for p, gradient in apart:
        if p.grad is None:
            p.grad = gradient
        elif p.grad.is_sparse and not gradient.is_sparse:
            p.grad = gradient + p.grad  # only the other way in place
        else:
            p.grad.add_(gradient)
