"""Two alternating buffers to gather layers in, and two to sum their gradients from.

    gathers | layer 0 -> A | layer 1 -> B | layer 2 -> A | ..
    passes  |              | layer 0      | layer 1      | ..

YaFSDP has them (Yandex 2024); here they are the memory of FSDP2's collectives, by its
hooks. FSDP2 orders the rest: a gather waits for the copies out of the buffer's last
layer, and the gradients of a layer for the sum before last.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.runtime.support.fsdp import Unit

__all__ = ["TwoBuffers", "alternate"]


class TwoBuffers:
    """Buffers that the layers of a stage have in turn.

    Args:
        n_bytes: of each.
        device: of them.
    """

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        self.buffers = [
            torch.empty(n_bytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        self._owners: list[Unit | None] = [None, None]
        self._turns = cycle(range(2))

    def take(self, unit: Unit, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the buffer whose turn it is, for numbers of a layer."""
        turn = next(self._turns)
        owner, self._owners[turn] = self._owners[turn], unit
        if owner is not None and owner.pending:  # gathered ahead in vain
            owner.drop()
        return self.buffers[turn][: numel * dtype.itemsize].view(dtype)


class _Memory:
    """The memory of one layer's collectives, and the collective.

    Args:
        unit: the layer.
        buffers: of all layers.
        is_buffered: tells of a number of elements whether they belong into a buffer.
        move: the collective.
    """

    def __init__(
        self,
        unit: Unit,
        buffers: TwoBuffers,
        is_buffered: Callable[[int], bool],
        move: Callable[..., dist.Work | None],
    ) -> None:
        self._unit, self._buffers = unit, buffers
        self._is_buffered, self._move = is_buffered, move

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return a buffer, or new memory for this process's part of a sum."""
        if self._is_buffered(size[0]):
            return self._buffers.take(self._unit, size[0], dtype)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any
    ) -> dist.Work | None:
        """Run the collective."""
        return self._move(output_tensor, input_tensor, *args, **options)


def alternate(
    chunks: Iterable[tuple[int, Sequence[Unit]]],
) -> tuple[TwoBuffers, TwoBuffers]:
    """Let the layers of a stage share buffers, and each pass gather the next layer.

    Args:
        chunks: numbers, and their layers in the order of F, each wrapped as a whole.

    Returns:
        The buffers for gathers, and those for sums.
    """
    chunks = [(chunk, units) for chunk, units in chunks if units]
    every = [unit for _, units in chunks for unit in units]
    gathers, sums = (
        TwoBuffers(n_bytes, next(every[0].module.parameters()).device)
        for n_bytes in map(max, zip(*(unit.whole_bytes for unit in every), strict=True))
    )
    for chunk, units in chunks:
        has_gradient = chunk > 0
        for i, unit in enumerate(units):
            module = unit.module
            module.set_custom_all_gather(
                _Memory(unit, gathers, lambda _: True, dist.all_gather_into_tensor)
            )
            module.set_custom_reduce_scatter(
                _Memory(unit, sums, unit.is_whole_gradient, dist.reduce_scatter_single)
            )
            if i + 1 < len(units):
                module.set_modules_to_forward_prefetch([units[i + 1].module])
            if i and (has_gradient := has_gradient or units[i - 1].trains):
                module.set_modules_to_backward_prefetch([units[i - 1].module])
    return gathers, sums
