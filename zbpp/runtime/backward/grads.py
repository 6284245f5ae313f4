"""The one writer of ``.grad``: a gradient is added as autograd's own node adds it.

    first gradient     becomes the leaf's ``.grad``
    later ones         are added to it, in place
    a part of a leaf   is added to that part of it

Autograd may do more for a leaf than to add: it runs hooks, casts, or sums processes'
tensors. `adds_only` tells where it does not; everything else goes to `hand_over`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zbpp.runtime.support.autograd_internals import edge_at

__all__ = [
    "GradTarget",
    "LeafSlice",
    "PendingGrads",
    "Root",
    "WeightGradients",
    "add_gradient",
    "add_gradients",
    "adds_only",
    "hand_over",
    "has_hooks",
    "restore_gradients",
    "set_gradients_aside",
]

_STRIDED = torch.strided

Root = Any
"""A leaf, or a node and the number of its output."""

PendingGrads = list[tuple[Tensor, Tensor]]
"""Parameters, and gradients that are not yet added to theirs."""


class WeightGradients:
    """The gradients of one product's operands, to be computed in W."""

    __slots__ = ()

    def of(self, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Turn the gradient of the product into those of its operands."""
        raise NotImplementedError

    def transposed(self, dy: Tensor) -> Tensor:
        """Return the transpose of the only operand's gradient."""
        return self.only(dy).t()

    def only(self, dy: Tensor) -> Tensor:
        """Return the only operand's gradient."""
        (gradient,) = self.of(dy)
        assert gradient is not None
        return gradient

    def add_to(self, total: Tensor, dy: Tensor) -> bool:
        """Add the only operand's gradient in the product's own kernel, if it can."""
        return False


class LeafSlice(NamedTuple):
    """A range of indices along one dimension of a leaf: an expert of many, say.

    Args:
        dim: the dimension.
        start, stop: its first index, and the one after its last.
        is_select: the slice has no such dimension.
    """

    dim: int
    start: int
    stop: int
    is_select: bool

    def of(self, whole: Tensor) -> Tensor:
        """Return a view of this slice."""
        if self.is_select:
            return whole.select(self.dim, self.start)
        return whole.narrow(self.dim, self.start, self.stop - self.start)


class GradTarget(NamedTuple):
    """Where the gradient of a product's operand is added.

    Args:
        leaf: the parameter.
        is_transposed: the operand is the transpose of the leaf, or of its slice.
        part: the slice of the leaf that the operand is; None: all of it.
    """

    leaf: Tensor
    is_transposed: bool = False
    part: LeafSlice | None = None

    def add(self, gradients: WeightGradients, dy: Tensor, *, in_place: bool) -> None:
        """Compute the gradient of the only operand, and add it.

        Args:
            gradients: of the product.
            dy: gradient of the product's output.
            in_place: add within the product's own kernel, where there is one.
        """
        leaf, is_transposed, part = self
        total = leaf.grad
        if total is None and part is not None:
            total = leaf.grad = torch.zeros_like(leaf, requires_grad=False)
        elif in_place and total is not None:
            view = total if part is None else part.of(total)
            if gradients.add_to(view.t() if is_transposed else view, dy):
                return
        gradient = gradients.transposed(dy) if is_transposed else gradients.only(dy)
        if total is None:
            add_gradient(leaf, gradient, is_fresh=True)
        elif part is None:
            total.add_(gradient)
        else:
            part.of(total).add_(gradient)


def has_hooks(leaf: Tensor) -> bool:
    """True if a leaf has hooks; those of its node, which it does not show, are not."""
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks)


def adds_only(leaf: Tensor, dtype: torch.dtype) -> bool:
    """True if a dense gradient of this dtype is added without a cast or a hook."""
    if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
        return False
    total = leaf.grad
    if total is not None:
        return total.dtype == dtype and total.layout is _STRIDED
    return dtype == leaf.dtype == getattr(leaf, "grad_dtype", dtype)


def add_gradient(leaf: Tensor, gradient: Tensor, *, is_fresh: bool) -> None:
    """Add a gradient that has the leaf's shape; called without a graph.

    Args:
        leaf: whose ``.grad`` it is.
        gradient: of the leaf.
        is_fresh: nothing else holds its memory, so that a first one may be kept.
    """
    total = leaf.grad
    if total is not None:
        if total.is_sparse and not gradient.is_sparse:  # only the other way in place
            leaf.grad = gradient + total
        else:
            total.add_(gradient)
        return
    if gradient.layout is not _STRIDED or gradient.stride() == leaf.stride():
        leaf.grad = gradient if is_fresh else gradient.clone()
    else:
        leaf.grad = torch.empty_like(leaf).copy_(gradient)


def add_gradients(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients that autograd has returned; called without a graph.

    They may be another tensor's too, or lie in memory that is written again, so a first
    one is copied. Those that are cast, or have hooks, go to autograd.

    Args:
        leaves: each once.
        gradients: one for each; None: there is none.
    """
    totals: list[Tensor] = []
    added: list[Tensor] = []
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is None:
            continue
        if gradient.layout is not _STRIDED or not adds_only(leaf, gradient.dtype):
            torch.autograd.backward([leaf], [gradient])
        elif leaf.grad is not None:
            totals.append(leaf.grad)
            added.append(gradient)
        else:
            add_gradient(leaf, gradient, is_fresh=False)
    if totals:
        torch._foreach_add_(totals, added)


def hand_over(ready: list[tuple[Root, Tensor]]) -> None:
    """Let autograd accumulate gradients in one call, and forget them."""
    if ready:
        roots = [
            edge_at(*root) if isinstance(root, tuple) else root for root, _ in ready
        ]
        torch.autograd.backward(roots, [gradient for _, gradient in ready])
        ready.clear()


def set_gradients_aside(leaves: Iterable[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """Let leaves have no ``.grad``; return what `restore_gradients` takes."""
    before = []
    for leaf in leaves:
        before.append((leaf, leaf.grad))
        leaf.grad = None
    return before


def restore_gradients(before: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Give leaves the ``.grad`` that they had, in place of what they have got."""
    for leaf, gradient in before:
        leaf.grad = gradient
