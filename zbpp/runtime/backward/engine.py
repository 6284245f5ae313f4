"""Let autograd run B: all but the deferred products' weight gradients.

Autograd computes what leads to the nodes that it is asked for. So it is asked for the
leaves of B, the inputs, and the products themselves: an edge to a product makes it run
even where nothing below it is wanted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime.backward.deferred_product import (
    DeferredWeightGrad,
    Site,
    may_add,
)
from zbpp.runtime.backward.ends import Ends
from zbpp.runtime.backward.graph import SplitPlan
from zbpp.runtime.backward.hooks import watch
from zbpp.runtime.backward.parts import LeafParts
from zbpp.runtime.backward.queue import WeightQueue
from zbpp.runtime.backward.regions import Taking
from zbpp.runtime.support.autograd_internals import (
    NoGrad,
    edge_at,
    returned_gradients,
    run_whole,
)

__all__ = ["add_gradients", "run_b", "run_cut_b", "run_full"]


def run_b(
    plan: SplitPlan,
    ends: Ends,
    inputs: Sequence[Tensor],
    queue: WeightQueue,
    is_exact: bool,
) -> tuple[Tensor | None, ...]:
    """Run B down to the inputs, all of them leaves; return their gradients.

    Args:
        plan: of the graph.
        ends: where B starts.
        inputs: leaves that require a gradient.
        queue: takes the work for W.
        is_exact: see `SplitGraph`.
    """
    if not plan.products and not plan.regions:
        return run_full(ends, inputs)
    if plan.returns:
        return _run_returning(plan, ends, inputs, queue, is_exact)
    if plan.is_alone:
        own = plan.leaves if plan.may_stop else ()
        if not all([x.requires_grad for x in own]):
            own = ()
        with Taking(plan.regions, queue, is_exact):
            return run_full(ends, inputs, own)
    left = _Left(queue, is_exact)
    wanted = [leaf for leaf in plan.leaves if leaf.requires_grad]
    hooks = _deferring(plan.products, left)
    compiled = [edge_at(node, 0) for node, _ in plan.regions]
    try:
        with Taking(plan.regions, queue, is_exact):
            return run_full(ends, inputs, [*wanted, *_edges(plan), *compiled])
    finally:
        for hook in hooks:
            hook.remove()


def _run_returning(
    plan: SplitPlan,
    ends: Ends,
    inputs: Sequence[Tensor],
    queue: WeightQueue,
    is_exact: bool,
) -> tuple[Tensor | None, ...]:
    """Run B without a call back into Python: torch returns all that B asks for."""
    kept = {id(x) for x in inputs}
    leaves = [leaf for leaf in plan.leaves if id(leaf) not in kept]
    taken = [product.take(node) for node, product, _ in plan.products]
    found = returned_gradients(*ends, [*inputs, *leaves, *_edges(plan)])
    first_product = len(inputs) + len(leaves)
    with NoGrad():
        add_gradients(leaves, found[len(inputs) : first_product])
    left = _Left(queue, is_exact)
    for (_, product, edges), one, dy in zip(
        plan.products, taken, found[first_product:], strict=True
    ):
        if dy is not None:
            left.add(product.leaf, product.defer(edges, dy, one))
    return found[: len(inputs)]


def add_gradients(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add as autograd does, without a graph; first gradients are copied.

    They may be another tensor's too, or lie in memory that is written again.
    """
    totals: list[Tensor] = []
    added: list[Tensor] = []
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is None:
            continue
        if gradient.layout is not torch.strided or not may_add(leaf, gradient.dtype):
            torch.autograd.backward([leaf], [gradient])
        elif leaf.grad is not None:
            totals.append(leaf.grad)
            added.append(gradient)
        elif gradient.stride() == leaf.stride():
            leaf.grad = gradient.clone()
        else:
            leaf.grad = torch.empty_like(leaf).copy_(gradient)
    if totals:
        torch._foreach_add_(totals, added)


class _Left:
    """The work that one B leaves for W.

    Args:
        queue: takes it.
        is_exact: see `SplitGraph`.
    """

    def __init__(self, queue: WeightQueue, is_exact: bool) -> None:
        self._queue = queue
        self._is_exact = is_exact
        self._add = _EXACTLY if is_exact else _IN_PLACE
        self._parts: dict[Any, LeafParts] = {}

    def add(self, leaf: Any, work: DeferredWeightGrad) -> None:
        """Leave the work of a product; if it is with a part of a leaf, beside others.

        Args:
            leaf: the node of a leaf used in parts, or None.
            work: of the product.
        """
        if leaf is None:
            self._queue.put(work, self._add)
            return
        parts = self._parts.get(leaf)
        if parts is None:
            parts = self._parts[leaf] = LeafParts()
            exactly, in_place = LeafParts.add_exactly, LeafParts.add_in_place
            self._queue.put(parts, exactly if self._is_exact else in_place)
        parts.append(work)


_EXACTLY = DeferredWeightGrad.add_exactly
_IN_PLACE = DeferredWeightGrad.add_in_place


def run_full(
    ends: Ends, inputs: Sequence[Tensor], wanted: Sequence[Any] | None = None
) -> tuple[Tensor | None, ...]:
    """Run a backward; return the gradients of inputs, and leave their ``.grad`` alone.

    Args:
        ends: where it starts.
        inputs: leaves that require a gradient.
        wanted: where it ends; None: at all leaves.
    """
    kept: list[tuple[Tensor, Tensor]] = []
    for x in inputs:
        if x.grad is not None:
            kept.append((x, x.grad))
            x.grad = None
    try:
        run_whole(*ends, wanted or ())
        return tuple([x.grad for x in inputs])
    finally:
        for x in inputs:
            x.grad = None
        for x, gradient in kept:
            x.grad = gradient


def run_cut_b(
    plan: SplitPlan,
    ends: Ends,
    inputs: Sequence[Tensor],
    queue: WeightQueue,
    is_exact: bool,
) -> tuple[Tensor | None, ...]:
    """Run B down to inputs that are no leaves, and no further; see `run_b`.

    Only ``autograd.grad`` stops at a node without running it. It adds nothing to the
    leaves: their gradients are handed over afterwards, and their hooks fire then.
    """
    kept = {id(x) for x in inputs}
    leaves = [p for p in plan.leaves if p.requires_grad and id(p) not in kept]
    below = [leaf for _, site in plan.regions for leaf in site.leaves]
    wanted = [*inputs, *leaves, *_edges(plan), *(edge_at(leaf, 0) for leaf in below)]
    hooked = [*leaves, *(leaf.variable for leaf in below)]
    ran: set[Any] = set()
    left = _Left(queue, is_exact)
    hooks = _deferring(plan.products, left, ran)
    try:
        with _without_hooks(hooked), Taking(plan.regions, queue, is_exact):
            found = torch.autograd.grad(
                ends[0], wanted, grad_outputs=ends[1], allow_unused=True
            )
    finally:
        for hook in hooks:
            hook.remove()
    result = found[: len(inputs)]
    first_product = len(inputs) + len(leaves)
    for site, dy in zip(plan.products, found[first_product:], strict=False):
        if dy is not None and site[0] not in ran:
            # nothing below it was wanted, so that it did not run
            _defer(site, left, None)((dy,))
    pairs = zip(leaves, found[len(inputs) : first_product], strict=True)
    ready = [(leaf, gradient) for leaf, gradient in pairs if gradient is not None]
    if ready:
        torch.autograd.backward([p for p, _ in ready], [g for _, g in ready])
    return result


def _edges(plan: SplitPlan) -> list[Any]:
    return [edge_at(node, 0) for node, _, _ in plan.products]


def _deferring(
    products: Sequence[Site], left: _Left, ran: set[Any] | None = None
) -> list[Any]:
    """Let products that run leave their work to W, and note those that ran.

    Returns:
        The handles of the hooks that do so, to be removed after B.
    """
    return [watch.add_prehook(site[0], _defer(site, left, ran)) for site in products]


def _defer(
    site: Site, left: _Left, ran: set[Any] | None
) -> Callable[[tuple[Tensor | None, ...]], None]:
    """Return what runs before the product in B: it keeps the operands and gradient."""
    node, product, edges = site

    def keep(gradients: tuple[Tensor | None, ...]) -> None:
        (dy,) = gradients
        if ran is not None:
            ran.add(node)
        if dy is not None:
            left.add(product.leaf, product.defer(edges, dy, product.take(node)))

    return keep


@contextmanager
def _without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Within this, the hooks of the leaves do not fire."""
    hooks = [(leaf, leaf._backward_hooks) for leaf in leaves if leaf._backward_hooks]
    for leaf, _ in hooks:
        leaf._backward_hooks = None
    try:
        yield
    finally:
        for leaf, own in hooks:
            leaf._backward_hooks = own
