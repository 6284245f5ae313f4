"""A number for the bits of a tensor, computed where the tensor is.

Processes compare numbers in place of tensors. A cryptographic hash would bring each
tensor to the host, and read it there at a GB/s; sums of integers are exact on every
device, run at the speed of its memory, and are one number each to fetch.
"""

from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import Tensor, nn

from zbpp.runtime.support.sharded import own_shard

__all__ = ["bits", "fingerprints"]

_COLUMNS = 1021
"""A prime: neighbours, and neighbours in a power of two, have other weights."""
_BLOCK = 4096 * _COLUMNS  # at once, as a sum of integers copies them to 64 bits
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7046029254386353131  # 2**64 over the golden ratio, as a signed number


def bits(tensor: Tensor) -> Tensor:
    """The bits of a dense tensor as integers, flat."""
    data = tensor.detach()
    if data.is_complex():
        data = torch.view_as_real(data.resolve_conj())
    return data.resolve_neg().reshape(-1).view(_INTEGERS[data.element_size()])


def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """A number for the bits of each tensor; of a DTensor this process's part counts.

    The host waits once for each device. What holds no numbers yet counts as 0.
    """
    prints: dict[int, Tensor] = {
        place: _fingerprint(tensor) for place, tensor in enumerate(tensors)
    }
    numbers = [0] * len(prints)
    for device in dict.fromkeys(x.device for x in prints.values()):
        places = [place for place, x in prints.items() if x.device == device]
        values = torch.stack([prints[place] for place in places]).tolist()
        for place, value in zip(places, values, strict=True):
            numbers[place] = value
    return numbers


def _fingerprint(tensor: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in _dense_parts(own_shard(tensor)):
        weights = _weights(part.device)
        for block in torch.split(bits(part), _BLOCK):
            n_rows, n_left = divmod(len(block), _COLUMNS)
            rows = block[: n_rows * _COLUMNS].view(n_rows, _COLUMNS)
            columns = rows.sum(dim=0, dtype=torch.int64)
            columns[:n_left] += block[n_rows * _COLUMNS :]
            total = total * _ODD + (columns * weights).sum()
    return total


@cache
def _weights(device: torch.device) -> Tensor:
    return torch.arange(1, _COLUMNS + 1, device=device) * _ODD


def _dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The dense tensors that hold the bits of a tensor, of any library's class."""
    if nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.is_quantized:
        return
    if tensor.layout is torch.sparse_coo:
        yield from (tensor.detach()._indices(), tensor.detach()._values())
    elif hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from _dense_parts(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor
