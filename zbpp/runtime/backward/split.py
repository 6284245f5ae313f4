"""B and W as two calls, for any module; this file knows nothing of pipelines.

The backward of a matrix product is two matrix products. Autograd runs both; here B
runs the first, keeps the operands of the second in a queue, and W runs the queue:

    F   y  = x w^T + b
    B   dx = dy w,  db = sum(dy)      keeps (x, dy)
    W   w.grad += dy^T x              drops them

F runs as ever: B finds the products in the graph that F has left (`harvest`). What is
no product, or not alone in using its weight, gets its gradient in B. All gradients go
through autograd's own accumulation, so hooks fire as they would, and a split backward
and ``loss.backward()`` agree to the last bit.

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
from torch.autograd.graph import GradientEdge

from zbpp.runtime.backward.data_parallel import check_module
from zbpp.runtime.backward.deferred_product import Product
from zbpp.runtime.backward.graph import SplitPlan, plan_split
from zbpp.runtime.backward.queue import WeightQueue
from zbpp.runtime.support.pytree import map_tensors

__all__ = ["SplitGraph", "split_forward"]


class SplitGraph:
    """The graph of one forward, whose backward is run as B, then W.

    Args:
        outputs: of the forward; those that need no gradient count for nothing.
        inputs: leaves whose gradients B returns.
        queue: where B leaves its work for W; some may be in it already.
        is_exact: round each weight gradient before it is added, as autograd does.
            False adds it within the matrix product's own kernel: faster, without a
            temporary of the weight's size, and different in the last bits. Hooks that
            only C++ can see (DistributedDataParallel's) then do not fire.
    """

    def __init__(
        self,
        outputs: Iterable[Tensor],
        inputs: Iterable[Tensor] = (),
        queue: WeightQueue | None = None,
        *,
        is_exact: bool = True,
    ) -> None:
        self._roots = [y for y in outputs if y.requires_grad]
        self._inputs = [x for x in inputs if x.requires_grad]
        self._queue = WeightQueue() if queue is None else queue
        self._is_exact = is_exact
        self._found: SplitPlan | None = None
        self._is_done = False
        self.outputs: Any = None
        """What the function returned, its tensors detached; set by `split_forward`."""

    def report(self) -> dict[Tensor, str]:
        """Where each parameter's gradient is computed: ``"W"``, or ``"B: "`` and why.

        To be asked before B.
        """
        inputs = {id(x) for x in self._inputs}
        where = self._plan().where()
        return {p: text for p, text in where.items() if id(p) not in inputs}

    def in_b(self) -> list[Tensor]:
        """The leaves whose gradients B computes, inputs included; ask before B."""
        return self._plan().leaves

    def in_w(self) -> list[Tensor]:
        """The leaves whose gradients W computes."""
        return self._plan().waiting

    def held_bytes(self) -> int:
        """Memory that B has left for W: operands of the deferred products.

        It is the least that can be held: for ``y = x w`` both ``x`` and ``dy``.
        """
        return self._queue.held_bytes()

    def _plan(self) -> SplitPlan:
        if self._found is None:
            self._found = plan_split(self._roots, self._inputs)
        return self._found

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
        """
        if self._is_done:
            raise RuntimeError("B runs once: its graph is freed; run a new forward")
        self._is_done = True
        if isinstance(gradients, Tensor):
            gradients = (gradients,)
        before = [x.grad for x in self._inputs]
        for x in self._inputs:
            x.grad = None
        if gradients is not None:
            self._roots, gradients = self._used(gradients)
        if self._roots:
            with self._queue.recording():
                self._run(gradients)
        result = tuple(x.grad for x in self._inputs)
        for x, gradient in zip(self._inputs, before, strict=True):
            x.grad = gradient
        self._roots, self._inputs, self.outputs = [], [], None
        return result

    def input_gradients(
        self, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """What B would return, without any gradient for parameters; B may follow."""
        roots, gradients = self._used(gradients)
        if not roots or not self._inputs:
            return (None,) * len(self._inputs)
        return torch.autograd.grad(
            roots, self._inputs, gradients, retain_graph=True, allow_unused=True
        )

    def _used(
        self, gradients: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The outputs that have influence, and their gradients."""
        pairs = zip(self._roots, gradients, strict=True)
        used = [(y, dy) for y, dy in pairs if dy is not None]
        return [y for y, _ in used], [dy for _, dy in used]

    def backward_weight(self) -> None:
        """W: the weight gradients that B has deferred, added to ``.grad``.

        Raises:
            RuntimeError: B has not run, or not to its end.
        """
        if not self._is_done or self._roots:
            raise RuntimeError("W runs after B")
        self._queue.run()

    def _run(self, gradients: Sequence[Tensor | None] | None) -> None:
        found = self._plan()
        self._found = SplitPlan([], [], found.waiting, {}, found.is_reentrant)
        if not found.products:
            torch.autograd.backward(self._roots, gradients)
            return
        # An edge to a product makes it run where nothing below it is wanted in B.
        edges = (GradientEdge(product.node, 0) for product in found.products)
        wanted: list[Any] = [*found.leaves, *edges]
        hooks = [
            product.node.register_prehook(self._defer(product))
            for product in found.products
        ]
        try:
            torch.autograd.backward(self._roots, gradients, inputs=wanted)
        finally:
            for hook in hooks:
                hook.remove()

    def _defer(self, product: Product) -> Callable[[tuple[Tensor, ...]], None]:
        """What the product's node does first in B: keep its operands and gradient."""

        def keep(gradients: tuple[Tensor | None, ...]) -> None:
            (dy,) = gradients
            if dy is not None:
                work = product.defer(dy)
                add = None if self._is_exact else work.add
                self._queue.defer(work.edges, work.compute, add, work.kept)

        return keep


def split_forward(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> SplitGraph:
    """F: call a module or function, and keep its graph for B and W.

    Args:
        function: what to call.
        args, kwargs: its arguments. Tensors among them (also in tuples, lists and
            dicts) that require a gradient are the inputs of B, in this order.

    Returns:
        The graph; its ``outputs`` are what the function returned.

    Raises:
        RequestError: a wrapper of data parallelism would miss the gradients of W.
    """
    if isinstance(function, nn.Module):
        check_module(function)
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def take(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(x.requires_grad)
        inputs.append(x)
        return x

    def give(y: Tensor) -> Tensor:
        outputs.append(y)
        return y.detach().requires_grad_(y.requires_grad)

    args, kwargs = map_tensors(args, take), map_tensors(kwargs, take)
    queue = WeightQueue()
    with queue.recording():
        result = function(*args, **kwargs)
    result = map_tensors(result, give)
    graph = SplitGraph(outputs, inputs, queue)
    graph.outputs = result
    return graph
