"""The header of a message: what the tensors behind it look like, as JSON."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from zbpp.core import Value, What
from zbpp.runtime.support.errors import ShapeError
from zbpp.runtime.values import Nested, Tensors, described

__all__ = [
    "HEADER_BYTES",
    "MOST_TENSORS",
    "Spec",
    "from_blocks",
    "pack",
    "rest_bytes",
    "spec_of",
    "to_blocks",
    "unpack",
]

HEADER_BYTES = 1024
"""Length of the first message of a header; most need no second."""
MOST_TENSORS = 250
"""Tensors in a message."""

_LENGTH_BYTES = 8

_WHATS = (What.ACTIVATION, What.GRADIENT)
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@dataclass(frozen=True)
class Spec:
    """Shapes and dtypes of the tensors of a value, and what holds them."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    needs_grad: tuple[bool, ...]
    structure: str | None = None
    """Of a `Nested` value."""

    def __str__(self) -> str:
        texts = (
            f"{str(dtype).removeprefix('torch.')}{list(shape)}"
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        return described(self.structure, texts)

    @property
    def n_bytes(self) -> int:
        """Size of the tensors."""
        sizes = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes)

    @classmethod
    def of(cls, tensors: Tensors) -> "Spec":
        """Describe plain tensors."""
        structure = tensors.structure if isinstance(tensors, Nested) else None
        if len(tensors) == 1:  # the common case, for speed
            (x,) = tensors
            return cls((tuple(x.shape),), (x.dtype,), (x.requires_grad,), structure)
        return cls(
            tuple(tuple(tensor.shape) for tensor in tensors),
            tuple(tensor.dtype for tensor in tensors),
            tuple(tensor.requires_grad for tensor in tensors),
            structure,
        )

    def fits(self, tensors: Tensors) -> bool:
        """True if one plain tensor is as this says; False may mean: look closer."""
        if type(tensors) is not tuple or len(tensors) != 1 or len(self.shapes) != 1:
            return False
        (x,) = tensors
        return (
            type(x) is Tensor
            and x.shape == self.shapes[0]
            and x.dtype is self.dtypes[0]
            and x.requires_grad is self.needs_grad[0]
            and x.layout is torch.strided
            and self.structure is None
        )

    @cached_property
    def of_gradients(self) -> "Spec":
        """The gradients: one for each tensor that needs one."""
        kept = [i for i, needs in enumerate(self.needs_grad) if needs]
        return Spec(
            tuple(self.shapes[i] for i in kept),
            tuple(self.dtypes[i] for i in kept),
            (False,) * len(kept),
        )

    def empty(self, device: torch.device) -> Iterator[Tensor]:
        """Make uninitialised buffers for the tensors."""
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            yield _blank(dtype, device).new_empty(shape)


@cache
def _blank(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor to make others like: faster than to name dtype and device each time."""
    return torch.empty((), dtype=dtype, device=device)


def spec_of(value: Value, tensors: tuple[Tensor, ...]) -> Spec:
    """Describe the tensors of a value.

    Raises:
        ShapeError: a tensor is more than one block of numbers.
    """
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            _refuse_others(value, tensor)
    return Spec.of(tensors)


def _refuse_others(value: Value, tensor: Tensor) -> None:
    """Refuse what holds its numbers elsewhere, as a DTensor or a sparse tensor does."""
    kind = type(tensor).__name__
    if hasattr(tensor, "__tensor_flatten__"):
        hint = "hand on a plain one (x.to_local()) and wrap it in the next layer"
        if kind != "DTensor":
            hint = "hand on the plain tensors in it and wrap them in the next layer"
        raise ShapeError(f"{value}: a {kind} cannot be sent between stages; {hint}")
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise ShapeError(
            f"{value}: a tensor of layout {layout} cannot be sent between stages; hand "
            "on a dense one, or its parts"
        )


def pack(value: Value, spec: Spec) -> bytes:
    """Write a header.

    Raises:
        ShapeError: too many tensors, or a dtype that cannot be sent.
    """
    for dtype in spec.dtypes:
        if dtype not in _DTYPES:
            raise ShapeError(f"{value}: {dtype} cannot be sent between stages")
    if len(spec.shapes) > MOST_TENSORS:
        raise ShapeError(
            f"{value}: {len(spec.shapes)} tensors are too many for one message, which "
            f"holds {MOST_TENSORS}; hand fewer from chunk to chunk"
        )
    dtypes = map(_DTYPES.index, spec.dtypes)
    tensors = zip(spec.shapes, dtypes, spec.needs_grad, strict=True)
    place = [_WHATS.index(value.what), value.chunk, value.microbatch]
    return json.dumps([place, [*tensors], spec.structure]).encode()


def unpack(header: bytes, expected: Value) -> Spec:
    """Read a header; it must announce the value that this end expects."""
    (what, chunk, microbatch), tensors, structure = json.loads(header)
    value = Value(_WHATS[what], chunk, microbatch)
    assert value == expected, f"{expected} was due, but {value} came"
    return Spec(
        tuple(tuple(shape) for shape, _, _ in tensors),
        tuple(_DTYPES[dtype] for _, dtype, _ in tensors),
        tuple(bool(needs) for _, _, needs in tensors),
        structure,
    )


def to_blocks(header: bytes) -> tuple[Tensor, Tensor | None]:
    """Return a header as two messages: one of `HEADER_BYTES`, and what it leaves."""
    text = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    first = torch.frombuffer(
        bytearray(text[:HEADER_BYTES].ljust(HEADER_BYTES)), dtype=torch.uint8
    )
    rest = bytearray(text[HEADER_BYTES:])
    return first, torch.frombuffer(rest, dtype=torch.uint8) if rest else None


def rest_bytes(first: Tensor) -> int:
    """Length of the second message of a header, 0 if there is none."""
    length = int.from_bytes(_bytes(first)[:_LENGTH_BYTES], "little")
    return max(0, _LENGTH_BYTES + length - HEADER_BYTES)


def from_blocks(first: Tensor, rest: Tensor | None) -> bytes:
    """Return the header that came in one or two messages."""
    text = _bytes(first) + (b"" if rest is None else _bytes(rest))
    length = int.from_bytes(text[:_LENGTH_BYTES], "little")
    return text[_LENGTH_BYTES : _LENGTH_BYTES + length]


def _bytes(block: Tensor) -> bytes:
    return bytes(block.tolist())
