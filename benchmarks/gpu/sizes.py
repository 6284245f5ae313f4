"""Where a GPU day measures, and how much."""

from dataclasses import dataclass

import torch

__all__ = ["Sizes"]


@dataclass(frozen=True)
class Sizes:
    """The device, and whether everything is as small as can be: a dry run."""

    device: torch.device
    is_tiny: bool = False
