"""Add the gradients of a chunk in micro-batch order, whatever the passes' order.

    passes run   B0 B2 B1 W0 W1 W2
    biases       db0,    db1 + db2       what B computes: in the order of the B's
    weights               dW0, dW1, dW2  what W computes: in the order of the W's

A pass that comes early is kept apart until its turn. A model may use a weight in other
ways for another micro-batch, so that its gradient comes from W once and from B the next
time: then B's waits for the W's before it. So all schedules end with the same bits.

Gradients that are computed in 16 bits and summed in 32 (`fully_shard`'s policies) are
widened after each addition: within a micro-batch they have 16 bits, over them 32.

Replicas may sum each micro-batch by itself, layer by layer within its W (`EachSum`).
Then B's gradients wait for that W, and no gradient is added to those of another one:

    passes run   B0   B1   W0               W1
    summed                 db0 and dW0      db1 and dW1
"""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from zbpp.runtime.backward.grads import (
    PendingGrads,
    add_gradient,
    restore_gradients,
    set_gradients_aside,
)
from zbpp.runtime.backward.plan_cache import SplitPlanCache
from zbpp.runtime.backward.queue import EachSum, Progress
from zbpp.runtime.backward.split import SplitGraph
from zbpp.runtime.support.autograd_internals import NoGrad

__all__ = ["GradientOrder", "run_isolated"]


class GradientOrder:
    """Runs B and W of one chunk.

    Args:
        parameters: all of the chunk's.
        widen: called after every addition, before that of another micro-batch.
        is_released: add every gradient when it is computed. Saves memory where a
            schedule runs passes out of order, and makes the last bits depend on it.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        widen: Callable[[], None] | None = None,
        *,
        is_released: bool = False,
    ) -> None:
        self._parameters = list(parameters)
        self._widen = widen
        self._is_released = is_released
        self.plans = SplitPlanCache()
        """Of the chunk's graphs."""
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._b, self._w = _Turns(), _Turns()
        self._n_microbatches = 0
        self._progress: Progress | None = None
        self._each: EachSum | None = None
        self._n_w = 0
        self._n_apart = 0
        """B's that run, and have set gradients aside until they end."""
        self._held: list[tuple[int, SplitGraph]] = []
        """W's that wait for these: what they add would be lost."""
        self._waiting: dict[int, Sequence[Tensor]] = {}
        """Of each micro-batch whose B has been added, what its W will add to."""
        self._late: dict[int, PendingGrads] = {}
        """Of each micro-batch, what its B has made and its W adds first."""

    def listen(self, n_microbatches: int, progress: Progress) -> None:
        """Tell how far the step's last W is, or all, if each is summed by itself."""
        self._n_microbatches, self._progress = n_microbatches, progress
        self._each = progress if isinstance(progress, EachSum) else None

    def run_b(
        self,
        microbatch: int,
        graph: SplitGraph,
        gradients: Sequence[Tensor | None],
    ) -> tuple[Tensor | None, ...]:
        """B of a micro-batch; see `SplitGraph.backward_input`."""
        if self._is_released:
            result = graph.backward_input(gradients)
            self._end_addition(microbatch)
            return result
        apart: Sequence[Tensor] = ()
        if self._each is not None or microbatch != self._b.turn:
            apart = self._parameters
        elif self._waiting and (others := self._waits_for(graph.in_w())):
            apart = [p for p in graph.in_b() if p in others]
        pending: PendingGrads = []
        if apart:
            self._n_apart += 1
            result, pending = run_isolated(graph, gradients, apart)
            self._n_apart -= 1
        else:
            result = graph.backward_input(gradients)
        waiting = graph.in_w()
        self._b.add(microbatch, lambda: self._end_b(microbatch, pending, waiting))
        while self._held and not self._n_apart:
            held, its_graph = self._held.pop(0)
            self.run_w(held, its_graph)
        return result

    def _end_b(
        self, microbatch: int, pending: PendingGrads, waiting: Sequence[Tensor]
    ) -> None:
        """Add what B has kept apart, but for what a W goes before."""
        late = pending
        if pending and self._each is None:
            others = self._waits_for(waiting)
            _add_all(pair for pair in pending if pair[0] not in others)
            late = [pair for pair in pending if pair[0] in others]
        if late:
            self._late[microbatch] = late
            waiting = [*waiting, *(p for p, _ in late)]
        self._waiting[microbatch] = waiting
        if self._each is None:
            self._end_addition(microbatch)

    def _waits_for(self, leaves: Sequence[Tensor]) -> set[Tensor]:
        """Parameters of earlier W's, but for graphs of one plan, which is theirs.

        Those leave to W what this one does, and nothing that it does in B.
        """
        return {
            p
            for earlier in self._waiting.values()
            if earlier is not leaves
            for p in earlier
        }

    def run_w(self, microbatch: int, graph: SplitGraph) -> None:
        """W of a micro-batch, or of several whose turn has come.

        While a B of another one has gradients set aside, it waits for that.
        """
        if self._n_apart:
            self._held.append((microbatch, graph))
        elif self._is_released:
            self._do_w(microbatch, graph)
        else:
            self._w.add(microbatch, lambda: self._do_w(microbatch, graph))

    def begin_w(self, microbatch: int, graph: SplitGraph, n_left: int) -> None:
        """Do a part of W, if it is its turn and nobody hears how far it is.

        Args:
            microbatch: of the graph, whose B may still run.
            graph: of the micro-batch.
            n_left: parts of it that are to come, the last of them by `run_w`.
        """
        is_last = self._n_w + 1 == self._n_microbatches
        is_heard = self._each is not None or (self._progress is not None and is_last)
        if is_heard or self._n_apart or microbatch != self._w.turn:
            return
        _add_all(self._late.pop(microbatch, ()))
        graph.begin_weight(n_left)

    def _do_w(self, microbatch: int, graph: SplitGraph) -> None:
        each = self._each
        if each is not None and not self._is_released:
            each.before()
        _add_all(self._late.pop(microbatch, ()))
        self._waiting.pop(microbatch, None)
        self._n_w += 1
        graph.backward_weight(self._listener())
        self._end_addition(microbatch)
        if each is not None:
            each.rest()

    def _listener(self) -> Progress | None:
        """Return the listener of the W that runs now: of the last one, or of each."""
        if self._each is not None:
            return self._each
        return self._progress if self._n_w == self._n_microbatches else None

    def run_bw(
        self,
        microbatch: int,
        graph: SplitGraph,
        gradients: Sequence[Tensor | None],
    ) -> tuple[Tensor | None, ...]:
        """BW of a micro-batch: one full backward where it is its turn in all.

        With released sums B and W add within the products, which is as fast.
        """
        at_once = microbatch == self._b.turn == self._w.turn
        if self._is_released or not at_once:
            result = self.run_b(microbatch, graph, gradients)
            self.run_w(microbatch, graph)
            return result
        each = self._each
        if each is None:
            result = graph.backward(gradients)
        else:
            each.before()
            with each.within_backward():
                result = graph.backward(gradients)
            each.rest()
        self._n_w += 1
        self._end_addition(microbatch)
        self._b.next()
        self._w.next()
        return result

    def _end_addition(self, microbatch: int) -> None:
        if self._widen is not None:
            self._widen()


class _Turns:
    """Runs actions in micro-batch order: one that comes early waits for its turn."""

    def __init__(self) -> None:
        self.turn = 0
        self._early: dict[int, Callable[[], None]] = {}

    def add(self, microbatch: int, action: Callable[[], None]) -> None:
        if microbatch != self.turn:
            self._early[microbatch] = action
            return
        action()
        self.next()

    def next(self) -> None:
        """The one whose turn it was is done: go on with those that came early."""
        self.turn += 1
        while self._early and (action := self._early.pop(self.turn, None)):
            action()
            self.turn += 1


def run_isolated(
    graph: SplitGraph,
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
) -> tuple[tuple[Tensor | None, ...], PendingGrads]:
    """Run B; return its result, and what some parameters would have got from it."""
    before = set_gradients_aside(parameters)
    try:
        result = graph.backward_input(gradients)
        return result, [(p, p.grad) for p in parameters if p.grad is not None]
    finally:
        restore_gradients(before)


def _add_all(pending: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add gradients that B has made before it was their turn."""
    with NoGrad():
        for parameter, gradient in pending:
            add_gradient(parameter, gradient, is_fresh=True)
