"""Copies of a state in host memory, kept from one save to the next.

A save blocks its caller for this copy only. Memory that was used before is copied to at
several times the speed of fresh memory, whose pages are cleared one by one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Staging"]


class Staging:
    """As much host memory as the state has bytes, from the first save on."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy all; what was copied before is overwritten.

        Args:
            tensors: on any device; GPUs are waited for.
        """
        held: dict[str, Tensor] = {}
        on_gpu = False
        for name, one in tensors.items():
            old = self._held.get(name)
            if old is None or (old.shape, old.dtype) != (one.shape, one.dtype):
                old = torch.empty(
                    one.shape, dtype=one.dtype, device="cpu", pin_memory=one.is_cuda
                )
            on_gpu = on_gpu or one.is_cuda
            held[name] = old.copy_(one.detach(), non_blocking=one.is_cuda)
        if on_gpu:
            torch.cuda.synchronize()
        self._held = held
        return held
