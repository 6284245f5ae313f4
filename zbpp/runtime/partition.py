"""Deal the layers of a model to chunks, and build only those that are needed here."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from zbpp.core import RequestError
from zbpp.runtime.chunk import Chunk, OwnName, layer_name
from zbpp.runtime.ties.find import BuilderWatch, refuse_sharing

__all__ = ["Model", "build_chunks", "count_layers", "partition_layers"]

Model = nn.Sequential | Sequence[nn.Module] | Callable[[range], Sequence[nn.Module]]
"""Layers, or a builder that makes the layers of a range of global indices."""

_LAYERS = (nn.Sequential, nn.ModuleList, Sequence)


def partition_layers(
    n_layers: int, n_chunks: int, split: Sequence[int] | None = None
) -> tuple[range, ...]:
    """Say which layers each chunk holds; without a split the first ones get one more.

    >>> partition_layers(7, 3)
    (range(0, 3), range(3, 5), range(5, 7))

    Raises:
        RequestError: fewer layers than chunks, or a split that does not add up.
    """
    if split is None:
        if n_layers < n_chunks:
            raise RequestError(
                f"{n_layers} layers cannot fill {n_chunks} chunks, one each at least; "
                "cut the model into more layers, or use fewer stages or a mode with "
                "fewer chunks a stage"
            )
        base, more = divmod(n_layers, n_chunks)
        split = [base + (chunk < more) for chunk in range(n_chunks)]
    if len(split) != n_chunks or sum(split) != n_layers or min(split) < 1:
        raise RequestError(
            f"split {list(split)} must have {n_chunks} entries from 1 on that add up "
            f"to {n_layers} layers; it has {len(split)}, with the sum {sum(split)}"
        )
    ranges = []
    first = 0
    for count in split:
        ranges.append(range(first, first + count))
        first += count
    return tuple(ranges)


def count_layers(model: Model, n_layers: int | None) -> int:
    """Count the layers of a model.

    Raises:
        RequestError: the model is a single module, or a builder without ``n_layers``.
    """
    if isinstance(model, _LAYERS):
        if n_layers is not None and n_layers != len(model):
            raise RequestError(
                f"n_layers is {n_layers}, but the model has {len(model)} layers"
            )
        return len(model)
    if isinstance(model, nn.Module) or not callable(model):
        raise RequestError(
            f"a {type(model).__name__} cannot be cut into layers; give an "
            "nn.Sequential, a list of layers, or a function that builds the layers of "
            "a range of indices (with n_layers)"
        )
    if n_layers is None:
        raise RequestError("a model given as a builder needs n_layers")
    return n_layers


def build_chunks(
    model: Model,
    ranges: Sequence[range],
    held: Sequence[int],
    *,
    knows_ties: bool = False,
    own_name: OwnName = layer_name,
) -> list[Chunk]:
    """Make the chunks of one stage.

    Args:
        model: layers or a builder.
        ranges: layers of each chunk.
        held: the chunks of this process.
        knows_ties: the caller has said which parameters layers share.
        own_name: of the model's parameters.

    Raises:
        RequestError: a builder returns a wrong number of layers, or layers of
            different chunks share a parameter that nobody has named.
    """
    chunk_of = partial(_chunk, own_name=own_name)
    if isinstance(model, _LAYERS):
        return [chunk_of(i, ranges[i], [model[n] for n in ranges[i]]) for i in held]
    if knows_ties:
        return [chunk_of(i, ranges[i], model(ranges[i])) for i in held]
    watch = BuilderWatch(model)
    chunks = [chunk_of(i, ranges[i], watch.layers(ranges[i])) for i in held]
    refuse_sharing((c.index, *one) for c in chunks for one in c.numbered())
    watch.check(ranges)
    return chunks


def _chunk(
    index: int, layers: range, built: Sequence[nn.Module], *, own_name: OwnName
) -> Chunk:
    if len(built) != len(layers):
        raise RequestError(
            f"the builder made {len(built)} layers for {layers}, not {len(layers)}"
        )
    return Chunk(index, layers.start, tuple(built), own_name=own_name)
