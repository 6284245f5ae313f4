"""Copies of a state in host memory, kept from one save to the next.

A save blocks its caller for this copy only. Memory that was used before is copied to at
several times the speed of fresh memory, whose pages are cleared one by one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from zbpp.runtime.support.devices import runs_ahead

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
        waits = False
        for name, one in tensors.items():
            old, is_ahead = self._held.get(name), runs_ahead(one.device)
            if old is None or (old.shape, old.dtype) != (one.shape, one.dtype):
                old = torch.empty(
                    one.shape, dtype=one.dtype, device="cpu", pin_memory=is_ahead
                )
            waits = waits or is_ahead
            held[name] = old.copy_(one.detach(), non_blocking=is_ahead)
        if waits:
            torch.accelerator.synchronize()
        self._held = held
        return held
