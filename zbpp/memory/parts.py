"""Parts of parameters that replicas keep where they divide them among one another.

`fully_shard` divides along the first dimension, and rounds up: the first replica keeps

    ceil(rows / n) rows, so a matrix of 10 rows on 4 replicas counts as one of 3

"""

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["part_of", "part_shape", "part_share"]


def part_shape(shape: Sequence[int], n: int) -> tuple[int, ...]:
    """Shape of the first replica's part of n; what has no dimension stays whole.

    >>> part_shape((10, 7), 4)
    (3, 7)
    """
    return (ceil(shape[0] / n), *shape[1:]) if len(shape) else ()


def part_share(tensor: Tensor, n: int) -> float:
    """Share of a tensor's numbers in its part, 1/n where its rows divide evenly."""
    if not tensor.numel():
        return 1.0
    return prod(part_shape(tensor.shape, n)) / tensor.numel()


def part_of(mode: Any, parameter: nn.Parameter, n: int) -> nn.Parameter:
    """Make a fake parameter of the part's shape; the parameter itself if n is 1."""
    if n == 1:
        return parameter
    with mode:
        part = torch.empty(
            part_shape(parameter.shape, n),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        return nn.Parameter(part, requires_grad=parameter.requires_grad)
