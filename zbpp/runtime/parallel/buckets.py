"""Gradients of layers that nobody has wrapped, summed over the replicas.

REDUCE_GRAD   a layer's gradients in one flat tensor, an all-reduce of it
REDUCE_WAIT   the sums, back where the gradients were

A parameter that this replica has not used counts with zeros: another one may have used
it, and every flat tensor must hold the same parameters at the same places.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.runtime.support.collectives import noting_broken
from zbpp.runtime.support.sharded import local_part, place_gradients

__all__ = ["Buckets"]


@dataclass
class _Sum:
    """An all-reduce that is under way, and what its parts are for."""

    flat: Tensor
    targets: Sequence[Tensor]
    work: dist.Work
    rest: Sequence[dist.ProcessGroup]


class Buckets:
    """The gradients of one layer.

    Args:
        parameters: of the layer.
        groups: processes that hold replicas, by dimension of the mesh.
        sums_each: every micro-batch is summed by itself, and kept apart until
            `put_back`: the next one's gradients must not be added to it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        groups: Sequence[dist.ProcessGroup],
        *,
        sums_each: bool = False,
    ) -> None:
        self._parameters = parameters
        self._groups = groups
        self._sums: list[_Sum] = []
        self._sums_each = sums_each
        self._taken: list[tuple[nn.Parameter, Tensor]] = []
        self._totals: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def reduce(self) -> None:
        """Start to sum the gradients; parameters that have none get zeros."""
        place_gradients(self._parameters)
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for p in self._parameters:
            if p.grad is None:
                if not p.requires_grad:
                    continue
                p.grad = torch.zeros_like(p, requires_grad=False)
            part = local_part(p.grad).numbers
            if part.layout is torch.sparse_coo:  # replicas may have other rows
                p.grad = part = part.to_dense()
            alike.setdefault((part.dtype, part.device), []).append(part)
        first, *rest = self._groups
        for targets in alike.values():
            flat = torch.cat([x.reshape(-1) for x in targets])
            work = dist.all_reduce(flat, group=first, async_op=True)
            self._sums.append(_Sum(flat, targets, work, rest))
        for p in self._parameters if self._sums_each else ():
            if p.grad is not None:
                self._taken.append((p, p.grad))
                p.grad = None

    @torch.no_grad()
    def wait(self) -> None:
        """Put the sums where the gradients are."""
        for pending in self._sums:
            with noting_broken():  # a limit here would hold up the host with NCCL
                pending.work.wait()
            for group in pending.rest:
                dist.all_reduce(pending.flat, group=group)
            pieces = torch.split(pending.flat, [x.numel() for x in pending.targets])
            for target, piece in zip(pending.targets, pieces, strict=True):
                target.copy_(piece.view_as(target))
        self._sums = []
        for p, gradient in self._taken:
            if p in self._totals:
                self._totals[p].add_(gradient)
            else:
                self._totals[p] = gradient
        self._taken = []

    def put_back(self) -> None:
        """Give the parameters the totals of all micro-batches that are kept apart."""
        for p, total in self._totals.items():
            p.grad = total
        self._totals = {}
