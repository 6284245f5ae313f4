"""The pieces of compiled regions that B leaves for W.

    B    region ── operands of all its pieces    one piece of work
    W    piece, piece, ...                       each added, its operands freed

So it is where W knows the leaf of every piece, and autograd would only add to it. Else
each piece is work of its own, as the products of a graph are.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime.backward.deferred_product import (
    DeferredWeightGrad,
    check_versions,
    versions_of,
)
from zbpp.runtime.backward.hooks import watch
from zbpp.runtime.backward.queue import Add, WeightQueue, Work, hand_over
from zbpp.runtime.compiled.plan import RegionSite
from zbpp.runtime.compiled.region import TAKERS, PieceGradients

__all__ = ["Taking"]

_STRIDED = torch.strided


class Taking:
    """Within this, compiled regions leave the operands of their pieces to W.

    Args:
        sites: nodes of the regions, and their shares of W.
        queue: gets the work.
        is_exact: see `SplitGraph`.
    """

    __slots__ = ("_is_exact", "_queue", "_sites")

    def __init__(
        self,
        sites: Sequence[tuple[Any, RegionSite]],
        queue: WeightQueue,
        is_exact: bool,
    ) -> None:
        self._sites, self._queue, self._is_exact = sites, queue, is_exact

    def __enter__(self) -> None:
        for node, site in self._sites:
            TAKERS[node] = partial(_take, site, self._queue, self._is_exact)

    def __exit__(self, *_: object) -> None:
        for node, _site in self._sites:
            TAKERS.pop(node, None)


def _take(
    site: RegionSite, queue: WeightQueue, is_exact: bool, held: list[Any]
) -> Sequence[int]:
    """Keep a region's operands for W; return the numbers of pieces that B makes."""
    work = _RegionWork(site, held)
    if site.known:
        queue.put(work, _EXACTLY if is_exact else _IN_PLACE)
        return ()
    add = _alone(is_exact)
    for number, edges in enumerate(site.edges):
        if edges:
            queue.put(work.piece(number), add)
    return [number for number, edges in enumerate(site.edges) if not edges]


def _alone(is_exact: bool) -> Add:
    """Return how a piece is added that is work of its own."""
    own = DeferredWeightGrad
    return own.add_exactly if is_exact else own.add_in_place


class _RegionWork:
    """All pieces of one region.

    Args:
        site: of the region.
        held: operands of the pieces, which the region numbers.
    """

    __slots__ = ("_n_hooks", "_site", "_versions", "kept")

    def __init__(self, site: RegionSite, held: list[Any]) -> None:
        self._site, self.kept = site, held
        self._versions = versions_of(held)
        self._n_hooks = watch.n_others

    @property
    def edges(self) -> list[Any]:
        """The roots that the gradients go to."""
        return [edge for own in self._site.edges for edge in own]

    def compute(self) -> tuple[Tensor | None, ...]:
        """Return the gradients.

        Raises:
            RuntimeError: an operand is no longer what B has left.
        """
        check_versions(self.kept, self._versions)
        found: list[Tensor | None] = []
        for number in range(len(self._site.targets)):
            found += self._take(number).compute()
        return tuple(found)

    def apart(self, add: Add) -> list[tuple[Work, Add]]:
        """Return the pieces as works of their own.

        Raises:
            RuntimeError: an operand is no longer what B has left.
        """
        check_versions(self.kept, self._versions)
        alone = _alone(add is _EXACTLY)
        return [(self.piece(i), alone) for i in range(len(self._site.targets))]

    def add_exactly(self) -> bool:
        """Add each gradient as autograd would, unless there are hooks by now."""
        return self._add(is_exact=True)

    def add_in_place(self) -> bool:
        """Add each within its product's kernel, where there is one."""
        return self._add(is_exact=False)

    def _add(self, *, is_exact: bool) -> bool:
        if self._n_hooks != watch.n_others:
            return False
        held = self.kept
        check_versions(held, self._versions)
        for number, one in enumerate(self._site.known):
            leaf, shards, take, frees, compute, add, dtype = one
            total = leaf.grad
            if shards is not None:
                total = shards.own(total)
            if (
                total is None
                or total.dtype is not dtype
                or total.layout is not _STRIDED
                or not leaf.requires_grad
            ):
                self._add_alone(number, is_exact)
            else:
                given = take(held)
                for i in frees:
                    held[i] = None
                if is_exact or add is None:
                    total.add_(compute(*given)[0])
                else:
                    add(total, *given)
        return True

    def _add_alone(self, number: int, is_exact: bool) -> None:
        work = self._take(number)
        if not (work.add_exactly() if is_exact else work.add_in_place()):
            pairs = zip(work.edges, work.compute(), strict=True)
            hand_over([(root, dw) for root, dw in pairs if dw is not None])

    def _take(self, number: int) -> DeferredWeightGrad:
        """Return the work of a piece, and forget what no later one needs."""
        work = self.piece(number)
        for i in self._site.region.frees[number]:
            self.kept[i] = None
        return work

    def piece(self, number: int) -> DeferredWeightGrad:
        """Return the work of one piece alone."""
        site = self._site
        _, places, recipe = site.region.pieces[number]
        operands = [self.kept[i] for i in places]
        shards = site.shards[number]
        gradients = PieceGradients(recipe, operands, shards)
        known = None if shards else site.targets[number]
        return DeferredWeightGrad(
            *(site.edges[number], gradients, operands),
            *(versions_of(operands), known, self._n_hooks),
            recipe.dtype,
        )


_EXACTLY = _RegionWork.add_exactly
_IN_PLACE = _RegionWork.add_in_place
