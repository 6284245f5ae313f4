"""Gradients of a layer that `fully_shard` has wrapped, summed from given memory.

Torch allocates what it sums, and waits for the sum where it starts it, on CPUs; here
the memory is given, and the parts are added later:

    whole gradients -> copied -> reduce-scatter .. -> added to this process's parts

A row of the memory holds what one process gets, of all parameters that learn. One that
this process has not used counts with zeros, as others may have used it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.runtime.support.collectives import noting_broken

__all__ = ["PartSums", "fill_unused"]


class _Sum(NamedTuple):
    """A sum of gradients of one dtype: of whose, and this process's part of it."""

    parameters: Sequence[Any]
    whole: Tensor
    part: Tensor


class PartSums:
    """Sums of one layer; one at a time.

    Args:
        mesh_info: torch's, of the processes that have a part each.
        parameters: torch's, of the layer.
    """

    def __init__(self, mesh_info: Any, parameters: Iterable[Any]) -> None:
        self._group: dist.ProcessGroup = mesh_info.shard_process_group
        self._others = getattr(mesh_info, "replicate_process_group", None)
        self._parameters = list(parameters)
        self._sums: list[_Sum] = []
        self._works: list[dist.Work] = []

    @property
    def has_gradients(self) -> bool:
        """There is something to sum."""
        return any(one._unsharded_param.grad is not None for one in self._parameters)

    @torch.no_grad()
    def take(self, buffer: Tensor) -> list[nn.Parameter]:
        """Copy the whole gradients to a buffer of bytes, and free them.

        Returns:
            The parameters that have none here, and count with zeros.
        """
        unused = fill_unused(self._parameters)
        n, end = self._group.size(), 0
        alike: dict[torch.dtype, list[Any]] = {}
        for one in self._parameters:
            if (whole := one._unsharded_param).grad is not None:
                alike.setdefault(whole.grad.dtype, []).append(one)
        for dtype, own in alike.items():
            n_numbers = n * sum(one.padded_sharded_param_size.numel() for one in own)
            begin, end = end, end + n_numbers * dtype.itemsize
            rows = buffer[begin:end].view(dtype)
            whole = [one._unsharded_param.grad for one in own]
            torch._chunk_cat(whole, 0, n, out=rows.view(n, -1))
            for one in own:
                one._unsharded_param.grad = None
            self._sums.append(_Sum(own, rows, rows.new_empty(n_numbers // n)))
        return unused

    def start(self) -> None:
        """Start the sums."""
        for one in self._sums:
            work = dist.reduce_scatter_single(
                one.part, one.whole, dist.ReduceOp.SUM, self._group, async_op=True
            )
            self._works.append(cast(dist.Work, work))

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for them, and add them."""
        for work, one in zip(self._works, self._sums, strict=True):
            with noting_broken():
                work.wait()
            if self._others is not None:
                dist.all_reduce(one.part, group=self._others)
            begin = 0
            for parameter in one.parameters:
                _add(parameter, one.part, begin)
                begin += parameter.padded_sharded_param_size.numel()
        self._sums, self._works = [], []


def fill_unused(parameters: Iterable[Any]) -> list[nn.Parameter]:
    """Give zeros to whole gradients that are not there.

    Args:
        parameters: torch's, of a layer; those that do not learn are left alone.

    Returns:
        The parameters with this process's part, where there was no gradient.
    """
    unused = []
    for one in parameters:
        whole = one._unsharded_param
        there = whole.grad is not None or one.unsharded_accumulated_grad is not None
        if there or not one.sharded_param.requires_grad:
            continue
        zeros = torch.zeros_like(whole, requires_grad=False)
        if one.reduce_dtype is None:
            whole.grad = zeros
        else:  # all gradients of a sum have one dtype
            one.unsharded_accumulated_grad = zeros.to(one.reduce_dtype)
        unused.append(one.sharded_param)
    return unused


def _add(parameter: Any, parts: Tensor, begin: int) -> None:
    """Add this process's part to its gradient; the first one is taken as it is."""
    size, stride = parameter.sharded_size, parameter.contiguous_sharded_stride
    part = parts.as_strided(size, stride, begin)
    own = parameter.sharded_param
    if own.grad is None:
        own.grad = parameter.to_sharded_dtensor(part)
    else:
        own.grad._local_tensor.add_(part)
    for hook in (getattr(own, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(own)
