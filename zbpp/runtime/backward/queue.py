"""The weight-gradient work of one micro-batch, between its B and its W."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from zbpp.runtime.backward.hooks import watch
from zbpp.runtime.support.autograd_internals import NoGrad, edge_at

__all__ = [
    "Add",
    "EachSum",
    "Late",
    "Progress",
    "Root",
    "WeightQueue",
    "Work",
    "current_queue",
    "hand_over",
]

Root = Any
"""A leaf, or a node and the number of its output."""
Late = list[tuple[Tensor, Tensor]]
"""Parameters, and gradients that are not yet added to theirs."""
Compute = Callable[[], tuple[Tensor | None, ...]]

_TOGETHER_BYTES = 4 * 2**20

_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class Work(Protocol):
    """The work that B leaves of one node."""

    @property
    def edges(self) -> Sequence[Root]:
        """The roots that the gradients go to; they may still grow in number."""

    @property
    def compute(self) -> Compute:
        """Returns one gradient for each edge."""

    @property
    def kept(self) -> Sequence[Tensor]:
        """The operands."""


Add = Callable[[Any], bool]
"""Given work: adds its gradients to ``.grad`` itself, or returns False."""


class Progress(Protocol):
    """Hears how far W is."""

    def begin(self, edges: Sequence[Sequence[Root]]) -> None:
        """W begins; where the gradients of each piece of work go, in its order."""

    def done(self, n: int) -> int:
        """The first n pieces are done, and their gradients are added.

        Returns:
            The number of pieces at which it wants to hear again.
        """


class EachSum(Progress, ABC):
    """Sums gradients of one micro-batch after another; those it has taken are gone."""

    @abstractmethod
    def before(self) -> None:
        """Sum what earlier micro-batches have left: another one's W is to add."""

    @abstractmethod
    def within_backward(self) -> AbstractContextManager[object]:
        """A full backward runs within this: sum the layers that it is done with."""

    @abstractmethod
    def rest(self) -> None:
        """Sum what is there."""


class _Call(NamedTuple):
    edges: Sequence[Root]
    compute: Compute
    kept: tuple[Tensor, ...] = ()


def _never(_: Any) -> bool:
    """Leave a gradient to autograd."""
    return False


class WeightQueue:
    """Weight-gradient work of one micro-batch, left by B for W."""

    def __init__(self) -> None:
        watch.look()
        self._work: list[tuple[Work, Add]] = []
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
            for work, _ in self._work
            for tensor in work.kept
            for storage in (part.untyped_storage() for part in _parts(tensor))
        }
        return sum(storages.values())

    def defer(self, roots: Sequence[Root], compute: Compute) -> None:
        """Keep a call for W.

        Args:
            roots: where the gradients go.
            compute: returns one for each root.
        """
        self._work.append((_Call(roots, compute), _never))

    def put(self, work: Work, add: Add) -> None:
        """Keep the work of a product.

        Args:
            work: for W.
            add: tried first, with the work.
        """
        self._work.append((work, add))

    def run(self, progress: Progress | None = None) -> None:
        """Make all calls, hand what they return to autograd, and forget them.

        Operands are freed as W proceeds. Small gradients are handed over together: a
        call of autograd costs up to 0.1 ms with cold caches.

        Args:
            progress: told between the calls.

        Raises:
            RuntimeError: an earlier run has failed, so that gradients are missing.
        """
        if self._has_failed:
            raise RuntimeError(
                "W has failed before, and its gradients are incomplete; clear them, "
                "and run a new forward, B and W"
            )
        self._has_failed = True
        self._run(progress)
        self._has_failed = False

    def _run(self, progress: Progress | None) -> None:
        self.began_s = time.perf_counter()
        if progress is not None:
            self._work = [one for pair in self._work for one in _apart(*pair)]
        stop = n_all = len(self._work)
        if progress is not None:
            progress.begin([work.edges for work, _ in self._work])
            stop = progress.done(0)
        self._work.reverse()
        while self._work:
            with NoGrad():
                ready = self._compute_some(max(0, n_all - stop))
            if ready:
                hand_over(ready)
            if progress is not None:
                stop = progress.done(n_all - len(self._work))

    def _compute_some(self, left: int) -> list[tuple[Root, Tensor]]:
        """Make calls until enough is to be handed over, or so many are left."""
        watch.look()
        ready: list[tuple[Root, Tensor]] = []
        n_bytes = 0
        while len(self._work) > left and n_bytes < _TOGETHER_BYTES:
            work, add = self._work.pop()
            if not add(work):
                # no variable: a gradient is freed before the next is computed
                ready += _defined(work.edges, work.compute())
                n_bytes = sum(gradient.nbytes for _, gradient in ready)
            del work
        return ready

    def __enter__(self) -> None:
        """Let modules that run within it and defer by themselves use it.

        A plain global, not a context variable: on a GPU autograd runs, and recomputes
        checkpointed blocks, in a thread of its own.
        """
        _recording.append(self)
        self.began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        _recording.pop()


_recording: list[WeightQueue] = []
"""The current queue is the last one."""


def _parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that hold its numbers: itself, unless it is sparse."""
    names = _SPARSE_PARTS.get(tensor.layout)
    return [tensor] if names is None else [getattr(tensor, name)() for name in names]


def _apart(work: Work, add: Add) -> list[tuple[Work, Add]]:
    """Return several works that were put as one."""
    apart = getattr(work, "apart", None)
    return [(work, add)] if apart is None else apart(add)


def _defined(
    roots: Sequence[Root], gradients: tuple[Tensor | None, ...]
) -> list[tuple[Root, Tensor]]:
    pairs = zip(roots, gradients, strict=True)
    return [(root, gradient) for root, gradient in pairs if gradient is not None]


def hand_over(ready: list[tuple[Root, Tensor]]) -> None:
    """Let autograd accumulate the gradients, and forget them."""
    if ready:
        roots = [edge_at(*x[:2]) if isinstance(x, tuple) else x for x, _ in ready]
        torch.autograd.backward(roots, [gradient for _, gradient in ready])
        ready.clear()


def current_queue() -> WeightQueue | None:
    """The queue of the pass that runs now, if its weight gradients are deferred."""
    return _recording[-1] if _recording else None
