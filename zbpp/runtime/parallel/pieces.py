"""All-gathers of FSDP2 in pieces of a multiple of 16 bytes.

part of each process | piece 0 | piece 1 | 2, padded |    gathered one by one
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

ALIGNED_BYTES = 16


class PieceGather:
    """Gathers a layer in pieces, and copies each to its place."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes

    def allocate(self, size: Sequence[int], **of: Any) -> Tensor:
        """Memory of a whole layer."""
        return torch.empty(*size, **of)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather in the current stream; only gloo lets the host wait."""
        width = input_tensor.element_size()
        rows = output_tensor.view(group.size(), -1)
        n = self._piece_bytes // width
        for piece, place in zip(
            torch.split(input_tensor, n), torch.split(rows, n, dim=1), strict=True
        ):
            padded = pad(piece, (0, -len(piece) % (ALIGNED_BYTES // width)))
            gathered = padded.new_empty(len(rows), len(padded))
            dist.all_gather_single(gathered.view(-1), padded, group=group)
            place.copy_(gathered[:, : len(piece)])
