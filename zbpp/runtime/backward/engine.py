"""Run B by autograd's engine: all but the weight gradients that wait.

Autograd computes what leads to the nodes that it is asked for. So it is asked for the
inputs, the leaves of B, and the products and regions that leave work to W: an edge to a
node makes it run even where nothing below it is wanted. There are two ways to ask:

    accumulate   a hook on each product takes its operands when the engine comes to it
    capture      the engine returns all gradients, those of the products too, so that
                 nothing calls back into Python; operands are taken before

The second one is faster, for graphs that have been seen before and in which nobody can
notice (`SplitPlan.captures`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from zbpp.runtime.backward.ends import Ends
from zbpp.runtime.backward.grads import (
    add_gradients,
    restore_gradients,
    set_gradients_aside,
)
from zbpp.runtime.backward.graph import SplitPlan
from zbpp.runtime.backward.layouts import InputLayouts
from zbpp.runtime.backward.products import SplitSite
from zbpp.runtime.backward.queue import WeightQueue
from zbpp.runtime.compiled.region import defer_pieces
from zbpp.runtime.support.autograd_internals import (
    NoGrad,
    add_hook,
    edge_at,
    hooks_made,
    run_backward,
)

__all__ = ["run_b", "run_full"]


def run_b(
    plan: SplitPlan,
    ends: Ends,
    inputs: Sequence[Tensor],
    queue: WeightQueue,
    *,
    layouts: InputLayouts,
) -> tuple[Tensor | None, ...]:
    """Run B down to the inputs; return their gradients.

    Args:
        plan: of the graph.
        ends: where B starts.
        inputs: leaves that require a gradient.
        queue: takes the work for W.
        layouts: of graphs like this one.
    """
    if not plan.products and not plan.regions:
        return run_full(ends, inputs, layouts=layouts)
    # A hook that the forward has set on an output would not see what is captured.
    if plan.captures and queue.n_hooks is not None and queue.n_hooks == hooks_made():
        return _capture(plan, ends, inputs, queue)
    wanted: list[Any] = [leaf for leaf in plan.leaves if leaf.requires_grad]
    wanted += [edge_at(site[0], 0) for site in plan.products]
    wanted += [edge_at(node, 0) for node, _ in plan.regions]
    hooks = [
        add_hook(site[0].register_prehook, _deferring(site, queue))
        for site in plan.products
    ]
    for node, site in plan.regions:
        defer_pieces(node, partial(site.defer, queue))
    try:
        return run_full(ends, inputs, wanted, layouts=layouts)
    finally:
        for node, _ in plan.regions:
            defer_pieces(node, None)
        for hook in hooks:
            hook.remove()


def _deferring(
    site: SplitSite, queue: WeightQueue
) -> Callable[[tuple[Tensor | None, ...]], None]:
    """Return what runs before the product in B: it keeps the operands and gradient."""
    node, product, edges = site

    def defer(gradients: tuple[Tensor | None, ...]) -> None:
        (dy,) = gradients
        if dy is not None:
            queue.put(product.work(edges, dy, product.take(node, queue)))

    return defer


def _capture(
    plan: SplitPlan, ends: Ends, inputs: Sequence[Tensor], queue: WeightQueue
) -> tuple[Tensor | None, ...]:
    inputs_in_b = {id(x) for x in inputs}
    leaves = [leaf for leaf in plan.leaves if id(leaf) not in inputs_in_b]
    taken = [product.take(node, queue) for node, product, _ in plan.products]
    edges = [edge_at(node, 0) for node, _, _ in plan.products]
    gradients = run_backward(*ends, [*inputs, *leaves, *edges], accumulates=False)
    first_product = len(inputs) + len(leaves)
    with NoGrad():
        add_gradients(leaves, gradients[len(inputs) : first_product])
    of_products = gradients[first_product:]
    for (_, product, waiting), operands, dy in zip(
        plan.products, taken, of_products, strict=True
    ):
        if dy is not None:
            queue.put(product.work(waiting, dy, operands))
    return gradients[: len(inputs)]


def run_full(
    ends: Ends,
    inputs: Sequence[Tensor],
    wanted: Sequence[Any] = (),
    *,
    layouts: InputLayouts,
) -> tuple[Tensor | None, ...]:
    """Run a backward; return the gradients of inputs, and leave their ``.grad`` alone.

    Args:
        ends: where it starts.
        inputs: leaves that require a gradient.
        wanted: where it ends; empty: at all leaves.
        layouts: of graphs like this one.
    """
    if not inputs:
        run_backward(*ends, wanted, accumulates=True)
        return ()
    before = set_gradients_aside(inputs)
    try:
        with layouts.kept(inputs) as kept:
            run_backward(*ends, wanted, accumulates=True)
        return tuple([kept.get(id(x), x.grad) for x in inputs])
    finally:
        restore_gradients(before)
