"""The header of a message: what the tensors behind it look like."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zbpp.core import Value, What
from zbpp.runtime.microbatches import TupleOfOne
from zbpp.runtime.support.errors import ShapeError

__all__ = ["HEADER_LENGTH", "Spec", "pack", "spec_of", "unpack"]

HEADER_LENGTH = 128
"""int64 numbers in a header."""

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
    """Shapes and dtypes of the tensors of one value, and which need a gradient."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    needs_grad: tuple[bool, ...]
    is_tuple_of_one: bool = False

    def __str__(self) -> str:
        text = ", ".join(
            f"{str(dtype).removeprefix('torch.')}{list(shape)}"
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        return f"({text},)" if self.is_tuple_of_one else text

    @property
    def n_bytes(self) -> int:
        """Size of the tensors."""
        sizes = zip(self.shapes, self.dtypes, strict=True)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes)

    def of_gradients(self) -> "Spec":
        """Describe the gradients: one for each tensor that needs one."""
        kept = [i for i, needs in enumerate(self.needs_grad) if needs]
        return Spec(
            tuple(self.shapes[i] for i in kept),
            tuple(self.dtypes[i] for i in kept),
            (False,) * len(kept),
        )

    def empty(self, device: torch.device) -> Iterator[Tensor]:
        """Make uninitialised buffers for the tensors."""
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            yield torch.empty(shape, dtype=dtype, device=device)


def spec_of(value: Value, tensors: tuple[Tensor, ...]) -> Spec:
    """Describe the tensors of a value.

    Raises:
        ShapeError: a tensor is more than one block of numbers.
    """
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            _refuse_others(value, tensor)
    return Spec(
        tuple(tuple(tensor.shape) for tensor in tensors),
        tuple(tensor.dtype for tensor in tensors),
        tuple(tensor.requires_grad for tensor in tensors),
        isinstance(tensors, TupleOfOne),
    )


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


def pack(value: Value, spec: Spec) -> Tensor:
    """Write a header.

    Raises:
        ShapeError: too many tensors or dimensions, or a dtype that cannot be sent.
    """
    numbers = [_WHATS.index(value.what), value.chunk, value.microbatch]
    numbers.append(-1 if spec.is_tuple_of_one else len(spec.shapes))
    for shape, dtype, needs in zip(
        spec.shapes, spec.dtypes, spec.needs_grad, strict=True
    ):
        if dtype not in _DTYPES:
            raise ShapeError(f"{value}: {dtype} cannot be sent between stages")
        numbers += [_DTYPES.index(dtype), needs, len(shape), *shape]
    if len(numbers) > HEADER_LENGTH:
        raise ShapeError(
            f"{value}: {len(spec.shapes)} tensors ({spec}) are too many for one "
            f"message; hand fewer from chunk to chunk"
        )
    header = torch.zeros(HEADER_LENGTH, dtype=torch.int64)
    header[: len(numbers)] = torch.tensor(numbers)
    return header


def unpack(header: Tensor, expected: Value) -> Spec:
    """Read a header; it must announce the value that this end expects."""
    numbers = iter(header.tolist())
    value = Value(_WHATS[next(numbers)], next(numbers), next(numbers))
    assert value == expected, f"{expected} was due, but {value} came"
    shapes, dtypes, needs_grad = [], [], []
    n_tensors = next(numbers)
    for _ in range(abs(n_tensors)):
        dtypes.append(_DTYPES[next(numbers)])
        needs_grad.append(bool(next(numbers)))
        shapes.append(tuple(next(numbers) for _ in range(next(numbers))))
    return Spec(tuple(shapes), tuple(dtypes), tuple(needs_grad), n_tensors < 0)
