"""Two alternating buffers to gather layers in, and two to sum their gradients from.

    gathers | layer 0 -> A | layer 1 -> B | layer 2 -> A | ..
    passes  |              | layer 0      | layer 1      | ..

YaFSDP has them (Yandex 2024); here they are the memory of FSDP2's collectives, by its
hooks. FSDP2 orders the rest: a gather waits for the copies out of the buffer's last
layer, and the gradients of a layer for the sum before last.
"""

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.runtime.support.fsdp import Unit


class _TwoBuffers:
    """Buffers that the layers of a stage have in turn, as large as their largest."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]
        self._owners: list[Unit | None] = [None, None]
        self._turns = cycle(range(2))

    def take(self, size: Sequence[int], owner: Unit | None = None, **of: Any) -> Tensor:
        """Return the buffer whose turn it is, for numbers of a layer."""
        turn = next(self._turns)
        before, self._owners[turn] = self._owners[turn], owner
        if before is not None and before.pending:  # gathered ahead in vain
            before.drop()
        n_bytes = size[0] * of["dtype"].itemsize
        if self._buffers[turn].numel() < n_bytes:
            self._buffers[turn] = torch.empty(n_bytes, **of | {"dtype": torch.uint8})
        return self._buffers[turn][:n_bytes].view(of["dtype"])


class _Gather:
    """The all-gather of one layer, into a buffer."""

    def __init__(self, unit: Unit, buffers: _TwoBuffers) -> None:
        self._unit, self._buffers = unit, buffers

    def allocate(self, size: Sequence[int], **of: Any) -> Tensor:
        return self._buffers.take(size, self._unit, **of)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return dist.all_gather_into_tensor(*args, **options)


class _Sum:
    """The reduce-scatter of all layers, from a buffer to new memory."""

    def __init__(self) -> None:
        self._buffers, self._is_input = _TwoBuffers(), cycle((True, False))

    def allocate(self, size: Sequence[int], **of: Any) -> Tensor:
        if next(self._is_input):
            return self._buffers.take(size, **of)
        return torch.empty(*size, **of)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any
    ) -> Any:
        return dist.reduce_scatter_single(output_tensor, input_tensor, *args, **options)


def alternate(chunks: Iterable[tuple[int, Sequence[Unit]]]) -> None:
    """Let the layers of a stage share buffers, and each pass gather the next layer.

    A chunk has its number, and its layers in the order of F, each wrapped as a whole.
    """
    buffers, sums = _TwoBuffers(), _Sum()
    for chunk, units in chunks:
        has_gradient = chunk > 0
        for i, unit in enumerate(units):
            module = unit.module
            module.set_custom_all_gather(_Gather(unit, buffers))
            module.set_custom_reduce_scatter(sums)
            if i + 1 < len(units):
                module.set_modules_to_forward_prefetch([units[i + 1].module])
            if i and (has_gradient := has_gradient or units[i - 1].trains):
                module.set_modules_to_backward_prefetch([units[i - 1].module])
