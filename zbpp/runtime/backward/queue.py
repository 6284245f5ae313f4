"""The weight-gradient work of one micro-batch, between its B and its W."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Protocol

import torch
from torch import Tensor

from zbpp.runtime.backward.grads import Root, hand_over
from zbpp.runtime.support.autograd_internals import NoGrad, hooks_made
from zbpp.runtime.support.sharded import own_shard
from zbpp.runtime.support.strides import copy_of

__all__ = [
    "DeferredWork",
    "EachSum",
    "Progress",
    "Root",
    "WeightQueue",
    "current_queue",
    "memory_of",
]

_TOGETHER_BYTES = 4 * 2**20
"""Gradients that one call of autograd accumulates: a call costs up to 0.1 ms with cold
caches, and until then the gradients are held."""

_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def memory_of(tensor: Tensor) -> int:
    """Return a number of the memory that a tensor, or this process's part, lies in."""
    part: Tensor = own_shard(tensor)
    number: int = part.untyped_storage()._cdata
    return number


class DeferredWork:
    """Work that B leaves for W.

    Args:
        roots: where its gradients go.
        kept: the operands that it holds.
    """

    __slots__ = ("kept", "roots")

    def __init__(self, roots: Sequence[Root], kept: Sequence[Tensor]) -> None:
        self.roots, self.kept = roots, kept

    def run(self, *, in_place: bool) -> Sequence[tuple[Root, Tensor | None]]:
        """Compute the gradients, and add those that need no more than that.

        Args:
            in_place: add within a product's own kernel, where there is one.

        Returns:
            The gradients that autograd has to accumulate, with their roots.
        """
        raise NotImplementedError

    def pieces(self) -> Sequence["DeferredWork"]:
        """Return the smallest works that this one consists of."""
        return (self,)


class _Call(DeferredWork):
    """A function that returns one gradient for each root."""

    __slots__ = ("_compute",)

    def __init__(
        self, roots: Sequence[Root], compute: Callable[[], Sequence[Tensor | None]]
    ) -> None:
        super().__init__(roots, ())
        self._compute = compute

    def run(self, *, in_place: bool) -> Sequence[tuple[Root, Tensor | None]]:
        return list(zip(self.roots, self._compute(), strict=True))


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


class WeightQueue:
    """Weight-gradient work of one micro-batch, left by B for W.

    ``with queue:`` makes it the `current_queue` of this thread, for modules that defer
    work by themselves.

    Args:
        lent: memory that is something else's between B and W, as `memory_of` tells it:
            parameters that were gathered for B.
    """

    def __init__(self, lent: Collection[int] = ()) -> None:
        self.lent = lent
        self.n_hooks = hooks_made()
        """Hooks of others when its forward began; None: unknown."""
        self.work: list[DeferredWork] = []
        """The pieces of work of W, in order."""
        self._has_failed = False
        self._token: Token[WeightQueue | None] | None = None
        self.began_s = 0.0
        """`time.perf_counter` when the pass that runs now began, for emulation."""

    def held_bytes(self) -> int:
        """Memory of all operands that wait for W; what shares memory counts once.

        Told by their storages: fake tensors have no address.
        """
        storages = {
            storage._cdata: storage.nbytes()
            for work in self.work
            for tensor in work.kept
            for storage in (part.untyped_storage() for part in _parts(tensor))
        }
        return sum(storages.values())

    def own(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is the same until W: itself, or a copy of lent memory.

        A layer's queries, say, may be parameters that a product multiplies by others.
        """
        return copy_of(tensor) if memory_of(tensor) in self.lent else tensor

    def put(self, work: DeferredWork) -> None:
        """Keep work for W."""
        self.work.append(work)

    def defer(
        self, roots: Sequence[Root], compute: Callable[[], Sequence[Tensor | None]]
    ) -> None:
        """Keep a call for W.

        Args:
            roots: where the gradients go.
            compute: returns one for each root.
        """
        self.work.append(_Call(roots, compute))

    def run(self, progress: Progress | None = None, *, in_place: bool = False) -> None:
        """Do all work, hand to autograd what it has to accumulate, and forget it.

        Operands are freed as W proceeds.

        Args:
            progress: told between the pieces of work.
            in_place: see `DeferredWork.run`.

        Raises:
            RuntimeError: an earlier run has failed, so that gradients are missing.
        """
        if self._has_failed:
            raise RuntimeError(
                "W has failed before, and its gradients are incomplete; clear them, "
                "and run a new forward, B and W"
            )
        self._has_failed = True
        self.began_s = time.perf_counter()
        if progress is not None:
            self.work = [piece for work in self.work for piece in work.pieces()]
        stop = n_all = len(self.work)
        if progress is not None:
            progress.begin([work.roots for work in self.work])
            stop = progress.done(0)
        self.work.reverse()
        while self.work:
            with NoGrad():
                ready = self._run_some(max(0, n_all - stop), in_place)
            hand_over(ready)
            if progress is not None:
                stop = progress.done(n_all - len(self.work))
        self._has_failed = False

    def run_first(self, n: int, *, in_place: bool = False) -> None:
        """Do the first n works; see `run`."""
        self.work, rest = self.work[:n], self.work[n:]
        self.run(in_place=in_place)
        self.work = rest

    def _run_some(self, n_left: int, in_place: bool) -> list[tuple[Root, Tensor]]:
        """Work until there is enough for one call of autograd, or no more is wanted."""
        ready: list[tuple[Root, Tensor]] = []
        n_bytes = 0
        while len(self.work) > n_left and n_bytes < _TOGETHER_BYTES:
            # no variables: operands are freed before the next work begins
            for root, gradient in self.work.pop().run(in_place=in_place):
                if gradient is not None:
                    ready.append((root, gradient))
                    n_bytes += gradient.nbytes
        return ready

    def __enter__(self) -> None:
        self._token = _current.set(self)
        self.began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _current.reset(self._token)


_current: ContextVar[WeightQueue | None] = ContextVar("weight_queue", default=None)


def current_queue() -> WeightQueue | None:
    """The queue of the pass that runs now, if its weight gradients are deferred.

    To be asked for in a forward: on a GPU autograd runs B in a thread of its own, which
    has none.
    """
    return _current.get()


def _parts(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that hold its elements: itself, unless it is sparse."""
    names = _SPARSE_PARTS.get(tensor.layout)
    return [tensor] if names is None else [getattr(tensor, name)() for name in names]
