"""Add the gradients of a chunk in micro-batch order, whatever the passes' order.

    passes run   B0 B2 B1 W0 W1 W2
    biases       db0,    db1 + db2       what B computes: in the order of the B's
    weights               dW0, dW1, dW2  what W computes: in the order of the W's

A B that comes early has its gradients set aside until its turn; a W waits for its turn.
So all schedules end with the same bits, if a weight waits for W in all micro-batches or
in none.

Gradients that are computed in 16 bits and summed in 32 (`fully_shard`'s policies) are
widened after each addition: within a micro-batch they have 16 bits, over them 32.

Replicas may sum each micro-batch by itself, layer by layer within its W (`Progress`).
Then B's gradients wait for that W, and no gradient is added to those of another one:

    passes run   B0   B1   W0               W1
    summed                 db0 and dW0      db1 and dW1
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from zbpp.runtime.backward.plan import PlanCache
from zbpp.runtime.backward.split import Progress, SplitGraph

Gradients = Sequence[Tensor | None]


class GradientOrder:
    """Runs B and W of one chunk; ``widen`` is called after every addition."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        widen: Callable[[], None] | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._widen = widen or (lambda: None)
        self.plans = PlanCache()
        """Of the chunk's graphs."""
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._b, self._w = _Turns(), _Turns()
        self._last = -1
        self._progress: Progress | None = None
        self._sums_each = False
        self._n_running_apart = 0
        """B's that run now, with all gradients set aside: no W may add any."""
        self._apart: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Of each micro-batch, gradients of its B that its W adds."""

    def listen(self, n_microbatches: int, progress: Progress) -> None:
        """Report the progress of the step's last W, or of each with `sums_each`."""
        self._last, self._progress = n_microbatches - 1, progress
        self._sums_each = progress.sums_each

    def run_b(
        self, microbatch: int, graph: SplitGraph, gradients: Gradients
    ) -> tuple[Tensor | None, ...]:
        """B of a micro-batch; see `SplitGraph.backward_input`."""
        if microbatch == self._b.turn and not self._sums_each:
            input_gradients = graph.backward_input(gradients)
            self._b[microbatch] = self._widen
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
        if self._sums_each:
            self._apart[microbatch] = apart
        else:
            self._b[microbatch] = lambda: self._add(apart)
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
        reports = self._sums_each or microbatch == self._last
        if self._sums_each:
            self._add(self._apart.pop(microbatch))
        graph.backward_weight(self._progress if reports else None)
        self._widen()
        if self._sums_each and self._progress is not None:
            self._progress.rest()

    def begin_w(self, microbatch: int, graph: SplitGraph, n_left: int) -> None:
        """Do a share of a W in its turn; `run_w` does the last one of `n_left`."""
        reports = self._sums_each or microbatch == self._last
        if not (reports or self._n_running_apart) and microbatch == self._w.turn:
            graph.begin_weight(n_left)

    def run_bw(
        self, microbatch: int, graph: SplitGraph, gradients: Gradients
    ) -> tuple[Tensor | None, ...]:
        """BW of a micro-batch: one full backward where it is its turn in both."""
        is_turn = microbatch == self._b.turn == self._w.turn
        if not is_turn or self._sums_each:
            input_gradients = self.run_b(microbatch, graph, gradients)
            self.run_w(microbatch, graph)
            return input_gradients
        input_gradients = graph.backward(gradients)
        self._b[microbatch] = self._w[microbatch] = self._widen
        self._b.run_due()
        self._w.run_due()
        return input_gradients

    @torch.no_grad()
    def _add(self, apart: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Add gradients that were set aside."""
        for p, gradient in apart:
            if p.grad is None:
                p.grad = gradient
            else:
                p.grad.add_(gradient)
        self._widen()


class _Turns(dict[int, Callable[[], None]]):
    """Actions of micro-batches, which run in the order of these."""

    turn = 0

    def run_due(self) -> None:
        """Run the actions whose turn has come."""
        while (action := self.pop(self.turn, None)) is not None:
            action()
            self.turn += 1
