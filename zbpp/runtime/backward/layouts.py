"""Gradients of inputs as autograd has them, not in the layout of ``.grad``.

    conv(x.mT)      dx has strides (1, 4), and x.grad those of x: it is a copy

The chunk before may sum dx, as the gradient of a bias, and how a sum is rounded depends
on strides: they must be those of a backward that no cut has interrupted.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime.support.autograd_internals import add_hook

__all__ = ["InputLayouts"]

_MAX_USUAL = 1024
_NONE = nullcontext[Mapping[int, Tensor]]({})


class InputLayouts:
    """Keeps gradients of other strides than their inputs, of graphs that are alike.

    Inputs of the same shapes and strides lead through the same layers: where the first
    gradients have the inputs' own strides, later ones are not looked at.
    """

    def __init__(self) -> None:
        self._usual: set[Any] = set()

    def kept(
        self, inputs: Sequence[Tensor]
    ) -> AbstractContextManager[Mapping[int, Tensor]]:
        """Within this a backward runs; yields its gradients of other strides.

        Args:
            inputs: leaves that require a gradient.

        Yields:
            The gradients by ``id`` of their inputs.
        """
        kind = tuple([(x.shape, x.stride()) for x in inputs])
        return _NONE if kind in self._usual else self._looking(kind, inputs)

    @contextmanager
    def _looking(
        self, kind: Any, inputs: Sequence[Tensor]
    ) -> Iterator[Mapping[int, Tensor]]:
        kept: dict[int, Tensor] = {}
        hooks = [add_hook(x.register_hook, partial(_keep, kept, x)) for x in inputs]
        try:
            yield kept
        finally:
            for hook in hooks:
                hook.remove()
        if not kept:
            if len(self._usual) == _MAX_USUAL:
                self._usual.clear()
            self._usual.add(kind)


def _keep(kept: dict[int, Tensor], leaf: Tensor, gradient: Tensor) -> None:
    if gradient.layout is torch.strided and gradient.stride() != leaf.stride():
        kept[id(leaf)] = gradient
