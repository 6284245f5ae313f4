"""Files of tensors in the safetensors format: a JSON header, then the bytes.

    8 bytes: length of the header | header, padded with spaces | tensor | tensor | ...

Source of the format: huggingface.co/docs/safetensors. Written one tensor after the
other, so that no second copy of them is made; nothing in it is ever executed.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "DTYPES",
    "Extent",
    "TensorIndex",
    "dtype_name",
    "raw",
    "read_header",
    "write_file",
]

TensorIndex = dict[str, dict[str, Any]]
"""For each tensor ``dtype``, ``shape`` and ``chunks``: file, key, offsets, sizes."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Kinds of numbers by the names that the format has for them."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 2**28
_WRONG = (AttributeError, LookupError, TypeError, ValueError)  # no such header
_PART = 2**24  # bytes that are written and hashed at a time


@dataclass(frozen=True)
class Extent:
    """The place of a tensor in a file: bytes from ``first`` to before ``last``."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    last: int


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a kind of numbers in the format.

    Raises:
        ValueError: the format has none.
    """
    if dtype not in _NAMES:
        raise ValueError(f"safetensors files hold no {dtype}")
    return _NAMES[dtype]


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, without a copy."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def write_file(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Write a file, and wait until the disk has it.

    Args:
        path: overwritten if it exists.
        tensors: on the CPU, contiguous.
        about: texts for the header.

    Returns:
        Its bytes, and their sha256.

    Raises:
        OSError: the disk is full, or has failed.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    place = 0
    for name in names:
        one = tensors[name]
        header[name] = {
            "dtype": dtype_name(one.dtype),
            "shape": list(one.shape),
            "data_offsets": [place, place + one.nbytes],
        }
        place += one.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        first = memoryview(len(text).to_bytes(8, "little") + text)
        for data in (first, *(raw(tensors[name]) for name in names)):
            for start in range(0, len(data), _PART):
                part = data[start : start + _PART]
                _write_all(file, part)
                digest.update(part)
                size += len(part)
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _write_all(file: Any, part: memoryview) -> None:
    while len(part):
        part = part[file.write(part) :]


def read_header(path: Path) -> dict[str, Extent]:
    """Places of the tensors of a file, by name.

    Raises:
        ValueError: it is not such a file, or is damaged.
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise ValueError("its header is cut off")
        try:
            header = json.loads(file.read(length))
            found = dict(_extents(header, 8 + length))
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
        ) as e:
            raise ValueError(f"its header is damaged ({e})") from e
    for name, one in found.items():
        size_told = math.prod(one.shape) * one.dtype.itemsize
        if min(one.shape, default=0) < 0 or one.last - one.first != size_told:
            raise ValueError(f"its header is damaged (size of {name})")
        if not 8 + length <= one.first <= one.last <= size:
            raise ValueError(f"it is cut off ({name})")
    return found


def _extents(header: dict[str, Any], base: int) -> Iterable[tuple[str, Extent]]:
    for name, one in header.items():
        if name != "__metadata__":
            first, last = (base + int(place) for place in one["data_offsets"])
            shape = tuple(int(n) for n in one["shape"])
            yield name, Extent(DTYPES[one["dtype"]], shape, first, last)
