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
    """Sums gradients over replicas while W runs."""

    sums_each: bool
    """Each micro-batch is summed by itself, which takes its gradients away."""

    @abstractmethod
    def rest(self) -> None:
        """Start the sums that have not begun."""


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
        """B's that run now, with all gradients set aside: no W may add any."""
        self._apart: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Of each micro-batch, gradients of its B that its W adds."""

    def listen(self, n_microbatches: int, progress: Summing) -> None:
        """Report the progress of the step's last W, or of each with `sums_each`."""
        self._n_microbatches, self._progress = n_microbatches, progress
        self._each = progress if progress.sums_each else None

    def run_b(
        self, microbatch: int, graph: SplitGraph, gradients: Gradients
    ) -> tuple[Tensor | None, ...]:
        """B of a micro-batch; see `SplitGraph.backward_input`."""
        if microbatch == self._b.turn and self._each is None:
            input_gradients = graph.backward_input(gradients)
            self._b[microbatch] = self._end_addition
            self._b.run_due()
            return input_gradients
        before = [(p, p.grad) for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        self._n_running_apart += 1
        try:
            input_gradients = graph.backward_input(gradients)
            apart = [(p, p.grad) for p in self._parameters if p.grad is not None]
        finally:
            self._n_running_apart -= 1
            for p, grad in before:
                p.grad = grad
        if self._each is not None:
            self._apart[microbatch] = apart
        else:
            self._b[microbatch] = lambda: self._end_b(apart)
            self._b.run_due()
        if not self._n_running_apart:
            self._w.run_due()
        return input_gradients

    def run_w(self, microbatch: int, graph: SplitGraph) -> None:
        """W of a micro-batch, or of several whose turn has come."""
        self._w[microbatch] = lambda: self._do_w(microbatch, graph)
        if not self._n_running_apart:
            self._w.run_due()

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
        """Do a share of W, whose B may still run; `run_w` does the last of `n_left`.

        Only in its turn, and where no progress is reported.
        """
        is_last = microbatch + 1 == self._n_microbatches
        reports = self._each is not None or (self._progress is not None and is_last)
        if not (reports or self._n_running_apart) and microbatch == self._w.turn:
            graph.begin_weight(n_left)

    def run_bw(
        self, microbatch: int, graph: SplitGraph, gradients: Gradients
    ) -> tuple[Tensor | None, ...]:
        """BW of a micro-batch: one full backward where it is its turn in both."""
        is_turn = microbatch == self._b.turn == self._w.turn
        if not is_turn or self._each is not None:
            input_gradients = self.run_b(microbatch, graph, gradients)
            self.run_w(microbatch, graph)
            return input_gradients
        input_gradients = graph.backward(gradients)
        self._b[microbatch] = self._w[microbatch] = self._end_addition
        self._b.run_due()
        self._w.run_due()
        return input_gradients

    def _end_b(self, apart: Iterable[tuple[Tensor, Tensor]]) -> None:
        _add_all(apart)
        self._end_addition()

    def _end_addition(self) -> None:
        if self._widen is not None:
            self._widen()


class _Turns(dict[int, Callable[[], None]]):
    """Actions of micro-batches, which run in the order of these."""

    turn = 0

    def run_due(self) -> None:
        """Run the actions whose turn has come."""
        while (action := self.pop(self.turn, None)) is not None:
            action()
            self.turn += 1


@torch.no_grad()
def _add_all(apart: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add gradients that were set aside."""
    for p, gradient in apart:
        if p.grad is None:
            p.grad = gradient
        else:
            p.grad.add_(gradient)
