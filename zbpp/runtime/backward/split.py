"""B and W as two calls, for any module; this file knows nothing of pipelines.

The backward of a matrix product is two matrix products. Autograd runs both; here B
runs the first, keeps the operands of the second in a queue, and W runs the queue:

    F   y  = x w^T + b
    B   dx = dy w,  db = sum(dy)      keeps (x, dy)
    W   w.grad += dy^T x              drops them

F runs as ever: B finds the products in the graph that F has left (`graph`). What is
no product, or not alone in using its weight, gets its gradient in B. Where autograd
would only add a gradient, W adds it; elsewhere it goes through autograd's own
accumulation, so hooks fire as they would. A split backward and ``loss.backward()``
agree to the last bit.

>>> import torch
>>> from zbpp.runtime.backward.split import split_forward
>>> layer = torch.nn.Linear(2, 2)
>>> x = torch.ones(1, 2, requires_grad=True)
>>> graph = split_forward(layer, x)
>>> (dx,) = graph.backward_input(torch.ones(1, 2))
>>> layer.weight.grad, layer.bias.grad
(None, tensor([1., 1.]))
>>> graph.backward_weight()
>>> layer.weight.grad
tensor([[1., 1.],
        [1., 1.]])
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.runtime.backward.causes import NO_WEIGHT, causes_in_b
from zbpp.runtime.backward.data_parallel import check_module
from zbpp.runtime.backward.ends import End, alias_of, end_of, fitting
from zbpp.runtime.backward.engine import run_b, run_full
from zbpp.runtime.backward.graph import REENTRANT, SplitPlan, node_of, plan_split
from zbpp.runtime.backward.layouts import InputLayouts
from zbpp.runtime.backward.plan_cache import SplitPlanCache
from zbpp.runtime.backward.queue import Progress, WeightQueue
from zbpp.runtime.support.pytree import map_tensors, refuse_hidden

__all__ = ["SplitGraph", "run_forward", "split_forward"]


class SplitGraph:
    """The graph of one forward, whose backward is run as B, then W.

    Of the outputs only the place in the graph is kept, not the data.

    Args:
        outputs: of the forward; those that need no gradient count for nothing.
        inputs: leaves whose gradients B returns.
        queue: where B leaves its work for W; some may be in it already.
        is_exact: round each weight gradient before it is added, as autograd does.
            False adds it within the matrix product's own kernel: faster, without a
            temporary of the weight's size, and different in the last bits. Hooks that
            only C++ can see (DistributedDataParallel's) do not fire in W, and a view
            of a weight retains no gradient.
        plans: of the graphs of forwards like this one; they need not be planned again.

    Raises:
        RequestError: an input that requires a gradient is no leaf.
    """

    def __init__(
        self,
        outputs: Iterable[Tensor],
        inputs: Iterable[Tensor] = (),
        queue: WeightQueue | None = None,
        *,
        is_exact: bool = True,
        plans: SplitPlanCache | None = None,
    ) -> None:
        self._ends: list[End] = []
        self._shapes: list[torch.Size | None] = []
        for y in outputs:  # no comprehension, which costs a call: a part of every F
            if y.requires_grad:
                self._ends.append(end_of(y))
                self._shapes.append(None if y.is_nested else y.shape)
        self._inputs: list[Tensor] = []
        for x in inputs:
            if x.requires_grad:
                if not x.is_leaf:
                    raise RequestError(
                        "an input of B is no leaf, so its own graph would run in B "
                        "too; run the forward on x.detach().requires_grad_()"
                    )
                self._inputs.append(x)
        if queue is None:
            queue = WeightQueue()
            queue.n_hooks = None  # it does not know when the forward began
        self._queue = queue
        self._is_exact = is_exact
        self._plans = plans
        self._layouts = InputLayouts() if plans is None else plans.layouts
        self._made_plan: SplitPlan | None = None
        self._is_done = self._deferred = False
        self.outputs: Any = None
        """The function's result, its tensors detached; set by `split_forward`."""

    def report(self, parameters: Iterable[Tensor] = ()) -> dict[Tensor, str]:
        """Say where each gradient is computed: ``"W"``, or ``"B: "`` and why.

        To be asked before B.

        Args:
            parameters: of the function, which a reentrant checkpoint hides.
        """
        inputs = {id(x) for x in self._inputs}
        plan = plan_split(self._ends, self._inputs)
        where = plan.where()
        if plan.is_reentrant:
            learning = (p for p in parameters if p.requires_grad)
            where = {**dict.fromkeys(learning, f"B: {REENTRANT}"), **where}
        in_b = f"B: {NO_WEIGHT}"
        if in_b in where.values():
            causes = causes_in_b(map(node_of, self._ends), inputs)
            for p, cause in causes.items():
                if where.get(p) == in_b:
                    where[p] = f"B: {cause}"
        return {p: text for p, text in where.items() if id(p) not in inputs}

    def in_b(self) -> list[Tensor]:
        """The leaves whose gradients B computes, inputs included; ask before B."""
        return self._plan().leaves

    def in_w(self) -> list[Tensor]:
        """The leaves whose gradients W computes."""
        return self._plan().waiting

    def defers(self) -> bool:
        """True if B has left work for W, or a module of its own kind has.

        After `backward`: if B would have.
        """
        return self._deferred or bool(self._queue.work)

    def held_bytes(self) -> int:
        """Memory that B has left for W: operands of the deferred products.

        It is the least that can be held: for ``y = x w`` both ``x`` and ``dy``.
        """
        return self._queue.held_bytes()

    def _plan(self) -> SplitPlan:
        if self._made_plan is None:
            plan = plan_split if self._plans is None else self._plans.plan
            self._made_plan = plan(self._ends, self._inputs)
        return self._made_plan

    def backward_input(
        self, gradients: Tensor | Sequence[Tensor | None] | None = None
    ) -> tuple[Tensor | None, ...]:
        """B: the gradients of the inputs, and of all that cannot wait for W.

        The graph is freed, but for what W needs.

        Args:
            gradients: one for each output that requires a gradient, None among them if
                an output has no influence; or None if all outputs are scalars.

        Returns:
            One for each input that requires a gradient; None if it has no influence.

        Raises:
            RuntimeError: B has run already.
            RequestError: the gradients do not fit the outputs; B may be called again.
        """
        if self._is_done:
            raise RuntimeError("B runs once: its graph is freed; run a new forward")
        ends, seeds = fitting(self._ends, self._shapes, gradients)
        plan = self._plan()
        self._is_done = True
        result: tuple[Tensor | None, ...] = (None,) * len(self._inputs)
        if ends:
            with self._queue:
                result = run_b(
                    plan,
                    (ends, seeds),
                    self._inputs,
                    self._queue,
                    layouts=self._layouts,
                )
        self._made_plan = SplitPlan([], [], [], plan.waiting, {}, plan.is_reentrant)
        self._ends, self._inputs, self.outputs = [], [], None
        return result

    def backward(
        self, gradients: Tensor | Sequence[Tensor | None] | None = None
    ) -> tuple[Tensor | None, ...]:
        """B and W at once: one full backward, for inputs that are leaves.

        Arguments, result and errors are those of B; W then has nothing to do.
        """
        if self._is_done:
            raise RuntimeError("B runs once: its graph is freed; run a new forward")
        ends, seeds = fitting(self._ends, self._shapes, gradients)
        self._is_done = True
        result: tuple[Tensor | None, ...] = (None,) * len(self._inputs)
        if ends:
            with self._queue:
                result = run_full((ends, seeds), self._inputs, layouts=self._layouts)
        self._ends, self._inputs, self.outputs = [], [], None
        if self._queue.work:
            self._deferred = True
            self._queue.run(in_place=not self._is_exact)
        return result

    def input_gradients(
        self, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Return what B would, without any gradient for parameters; B may follow.

        Raises:
            RequestError: the gradients do not fit the outputs.
        """
        ends, seeds = fitting(self._ends, self._shapes, gradients)
        if not ends or not self._inputs:
            return (None,) * len(self._inputs)
        return torch.autograd.grad(
            ends, self._inputs, seeds, retain_graph=True, allow_unused=True
        )

    def backward_weight(self, progress: Progress | None = None) -> None:
        """W: the weight gradients that B has deferred, added to ``.grad``.

        Args:
            progress: told how far it is.

        Raises:
            RuntimeError: B has not run, or not to its end, or an earlier W has failed.
        """
        if not self._is_done or self._ends:
            raise RuntimeError("W runs after B")
        self._queue.run(progress, in_place=not self._is_exact)

    def begin_weight(self, n_left: int) -> None:
        """Do a part of W: what an unfinished B has left so far, or else a share.

        Args:
            n_left: parts of W to come, this one included.
        """
        n_works = len(self._queue.work)
        n = n_works if self._ends else -(-n_works // n_left)
        self._queue.run_first(n, in_place=not self._is_exact)


def split_forward(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> SplitGraph:
    """F: call a module or function, and keep its graph for B and W.

    Args:
        function: what to call.
        *args: its arguments. Tensors among them that require a gradient, also in
            tuples, lists, dicts, dataclasses and what torch's pytree knows, are the
            inputs of B, in this order. Those that are no leaves may be changed in
            place.
        **kwargs: its arguments with names; their tensors come after the others.

    Returns:
        The graph; its ``outputs`` are what the function returned, in the same
        containers.

    Raises:
        RequestError: a wrapper of data parallelism would miss the gradients of W, or a
            tensor that needs a gradient is hidden in an object of an unknown kind.
    """
    if isinstance(function, nn.Module):
        check_module(function)
    return run_forward(function, args, kwargs)


def run_forward(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    may_change_leaves: bool = False,
) -> SplitGraph:
    """F of `split_forward`, unchecked.

    Args:
        function: what to call.
        args, kwargs: its arguments.
        may_change_leaves: let it change even inputs in place that are leaves.
    """
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def take(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_(x.requires_grad)
        inputs.append(leaf)
        if not x.requires_grad or (x.is_leaf and not may_change_leaves):
            return leaf
        return alias_of(leaf)

    def give(y: Tensor) -> Tensor:
        outputs.append(y)
        return y.detach().requires_grad_(y.requires_grad)

    args = map_tensors(args, take, refuse_hidden)
    kwargs = map_tensors(kwargs, take, refuse_hidden)
    queue = WeightQueue()
    with queue:
        result = function(*args, **kwargs)
    result = map_tensors(result, give, refuse_hidden)
    graph = SplitGraph(outputs, inputs, queue)
    graph.outputs = result
    return graph
