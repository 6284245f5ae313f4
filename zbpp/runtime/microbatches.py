"""Cut a batch into micro-batches."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from zbpp.core import RequestError

__all__ = [
    "Batch",
    "Tensors",
    "TupleOfOne",
    "as_tensors",
    "as_value",
    "count_samples",
    "split_inputs",
    "split_targets",
]

Tensors = tuple[Tensor, ...]
"""A micro-batch, or a value that one chunk hands to the next: one tensor or several."""


class TupleOfOne(tuple[Tensor, ...]):
    """A value that is a tuple of one; any other `Tensors` of one is a bare tensor."""


def as_tensors(value: Any) -> Tensors:
    """Return a value as it travels; a wrong kind stays as it is, to be refused."""
    if not isinstance(value, tuple):
        return (value,)
    return TupleOfOne(value) if len(value) == 1 and type(value) is tuple else value


def as_value(tensors: Tensors) -> Tensor | Tensors:
    """Return what a layer takes: the inverse of `as_tensors`."""
    if len(tensors) != 1:
        return tensors
    return tuple(tensors) if isinstance(tensors, TupleOfOne) else tensors[0]


Batch = Tensor | tuple[Tensor, ...] | list[object]
"""Tensors that are cut along their first dimension, or a list of micro-batches."""


def split_inputs(batch: Batch | None, n: int, *, even: bool = True) -> list[Tensors]:
    """Cut inputs into micro-batches of one or several tensors.

    Args:
        batch: tensors of shape (samples, ...), or a list of ``n`` micro-batches.
        n: number of micro-batches.
        even: refuse micro-batches of different sizes.

    Raises:
        RequestError: the batch cannot be cut so.
    """
    pieces = _split("inputs", batch, n, even=even)
    return [as_tensors(piece) for piece in pieces]


def split_targets(batch: Batch | None, n: int, *, even: bool = True) -> list[object]:
    """Cut targets; arguments and errors as for `split_inputs`."""
    return _split("targets", batch, n, even=even)


def count_samples(micro_batch: object) -> int:
    """Samples of a micro-batch; 1 where that cannot be told."""
    first = micro_batch[0] if isinstance(micro_batch, tuple) else micro_batch
    return len(first) if isinstance(first, Tensor) and first.dim() else 1


def _split(name: str, batch: Batch | None, n: int, *, even: bool) -> list[object]:
    if batch is None:
        raise RequestError(f"this process needs the {name} of the batch, not None")
    if isinstance(batch, list):
        if len(batch) != n:
            raise RequestError(
                f"{name} is a list of {len(batch)}; give one entry for each of {n} "
                "micro-batches, or tensors to be cut"
            )
        return batch
    if isinstance(batch, Tensor):
        return list(_cut(name, batch, n, even=even))
    if isinstance(batch, tuple) and all(isinstance(x, Tensor) for x in batch):
        parts = [_cut(name, x, n, even=even) for x in batch]
        return list(zip(*parts, strict=True))
    raise RequestError(
        f"{name} is a {type(batch).__name__}; give a tensor, a tuple of tensors, or a "
        "list of micro-batches"
    )


def _cut(name: str, tensor: Tensor, n: int, *, even: bool) -> Sequence[Tensor]:
    samples = len(tensor) if tensor.dim() else 0
    if samples < n or (even and samples % n):
        raise RequestError(
            f"{name} has {samples} samples, which {n} micro-batches cannot share"
            f"{' evenly' if even else ''}; change the batch size or n_microbatches"
        )
    return tensor.tensor_split(n)
