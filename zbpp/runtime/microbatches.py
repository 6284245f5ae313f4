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
    "check_tensors",
    "count_samples",
    "samples_to_cut",
    "split_inputs",
    "split_targets",
]

Tensors = tuple[Tensor, ...]
"""Value handed from chunk to chunk, or a micro-batch: one tensor or several."""


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


def check_tensors(tensors: Tensors, what: str) -> None:
    """Refuse what cannot travel between chunks as it is.

    Raises:
        RequestError: an item is no tensor, or the tuple is one of a class of its own.
    """
    if type(tensors) not in (tuple, TupleOfOne):
        kinds = f"a {type(tensors).__name__}"
    elif all(isinstance(tensor, Tensor) for tensor in tensors):
        return
    else:
        kinds = ", ".join(type(tensor).__name__ for tensor in tensors)
    raise RequestError(f"{what} {kinds}; it must be a tensor or a tuple of tensors")


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
    known = _known_samples(micro_batch)
    return 1 if known is None else known


def samples_to_cut(batch: Batch | None) -> int | None:
    """Samples of a batch that is to be cut; None for a list of micro-batches."""
    return None if isinstance(batch, list) else _known_samples(batch)


def _known_samples(thing: object) -> int | None:
    first = thing[0] if isinstance(thing, tuple) and thing else thing
    return len(first) if isinstance(first, Tensor) and first.dim() else None


def _split(name: str, batch: Batch | None, n: int, *, even: bool) -> list[object]:
    if batch is None:
        raise RequestError(f"this process needs the {name} of the batch, not None")
    if isinstance(batch, list):
        if len(batch) != n:
            raise RequestError(
                f"{name} is a list of {len(batch)}; give one entry for each of {n} "
                "micro-batches, or tensors to be cut"
            )
        sizes = list(map(_known_samples, batch))
        if even and len({size for size in sizes if size is not None}) > 1:
            raise RequestError(
                f"{name} is a list of micro-batches of {sizes} samples; a step weighs "
                "all of them alike, so give them the same size"
            )
        return batch
    if isinstance(batch, Tensor):
        return list(_cut(name, batch, n, even=even))
    if isinstance(batch, tuple) and all(isinstance(x, Tensor) for x in batch):
        sizes = [_known_samples(x) for x in batch]
        if len(set(sizes)) > 1:
            raise RequestError(
                f"{name} is a tuple of tensors of {sizes} samples; they must have the "
                "same number, or be given as a list of micro-batches"
            )
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
    pieces = tensor.tensor_split(n)
    if tensor.requires_grad:
        return pieces
    # A version counter for each: a layer may change its micro-batch in place although
    # the graphs of others, cut from the same tensor, are alive.
    return [piece.data for piece in pieces]
