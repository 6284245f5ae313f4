"""The weight-gradient work of one micro-batch, between its B and its W."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime.backward.hooks import watch
from zbpp.runtime.support.autograd_internals import edge_at

__all__ = ["WeightQueue", "current_queue"]

Root = Any
"""A leaf, or a node and the number of its output."""
Work = Callable[[], tuple[Tensor | None, ...]]
Add = Callable[[], bool] | None
Kept = Sequence[Tensor]

_TOGETHER_BYTES = 4 * 2**20

_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class WeightQueue:
    """Weight-gradient work of one micro-batch, left by B for W."""

    def __init__(self) -> None:
        watch.look()
        self._work: list[tuple[Sequence[Root], Work, Add, Kept]] = []
        self._has_failed = False
        self.began_s = 0.0
        """`time.perf_counter` when the pass that runs now began, for emulation."""

    def __len__(self) -> int:
        return len(self._work)

    def held_bytes(self) -> int:
        """Memory of all operands that wait for W; what shares memory counts once.

        Told by their storages: fake tensors have no address.
        """
        storages = {
            storage._cdata: storage.nbytes()
            for *_, kept in self._work
            for tensor in kept
            for storage in (part.untyped_storage() for part in _parts(tensor))
        }
        return sum(storages.values())

    def defer(
        self,
        roots: Sequence[Root],
        compute: Work,
        add: Add = None,
        kept: Kept = (),
    ) -> None:
        """Keep a call for W.

        Args:
            roots: where the gradients go; it may still grow, as what is kept may.
            compute: returns one for each root.
            add: tried first, if given: adds to ``.grad`` itself, or returns False.
            kept: the operands, for `held_bytes`.
        """
        self._work.append((roots, compute, add, kept))

    def run(self) -> None:
        """Make all calls, hand what they return to autograd, and forget them.

        Operands are freed as W proceeds. Small gradients are handed over together: a
        call of autograd costs up to 0.1 ms with cold caches.

        Raises:
            RuntimeError: an earlier run has failed, so that gradients are missing.
        """
        if self._has_failed:
            raise RuntimeError(
                "W has failed before, and its gradients are incomplete; clear them, "
                "and run a new forward, B and W"
            )
        self._has_failed = True
        self._run()
        self._has_failed = False

    def _run(self) -> None:
        self.began_s = time.perf_counter()
        self._work.reverse()
        while self._work:
            with torch.no_grad():
                ready = self._compute_some()
            _hand_over(ready)

    def _compute_some(self) -> list[tuple[Root, Tensor]]:
        """Make calls until enough is to be handed over, or none is left."""
        watch.look()
        ready: list[tuple[Root, Tensor]] = []
        n_bytes = 0
        while self._work and n_bytes < _TOGETHER_BYTES:
            roots, compute, add, kept = self._work.pop()
            if add is None or not add():
                # no variable: a gradient is freed before the next is computed
                ready += _defined(roots, compute())
                n_bytes = sum(gradient.nbytes for _, gradient in ready)
            del compute, add, kept
        return ready

    def recording(self) -> "_Recording":
        """Let modules that run within it and defer by themselves use me.

        A plain global, not a context variable: on a GPU autograd runs, and recomputes
        checkpointed blocks, in a thread of its own.
        """
        return _Recording(self)


class _Recording:
    """Makes a queue the current one."""

    def __init__(self, queue: WeightQueue) -> None:
        self._queue = queue
        self._before: WeightQueue | None = None

    def __enter__(self) -> None:
        global _current
        self._before, _current = _current, self._queue
        self._queue.began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        global _current
        _current = self._before


_current: WeightQueue | None = None


def _parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that hold its numbers: itself, unless it is sparse."""
    names = _SPARSE_PARTS.get(tensor.layout)
    return [tensor] if names is None else [getattr(tensor, name)() for name in names]


def _defined(
    roots: Sequence[Root], gradients: tuple[Tensor | None, ...]
) -> list[tuple[Root, Tensor]]:
    pairs = zip(roots, gradients, strict=True)
    return [(root, gradient) for root, gradient in pairs if gradient is not None]


def _hand_over(ready: list[tuple[Root, Tensor]]) -> None:
    """Let autograd accumulate the gradients, and forget them."""
    if ready:
        roots = [edge_at(*x[:2]) if isinstance(x, tuple) else x for x, _ in ready]
        torch.autograd.backward(roots, [gradient for _, gradient in ready])
        ready.clear()


def current_queue() -> WeightQueue | None:
    """The queue of the pass that runs now, if its weight gradients are deferred."""
    return _current
