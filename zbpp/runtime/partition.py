"""Deal the layers of a model to chunks, and build only those that are needed here."""

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from zbpp.core import RequestError, a_kind
from zbpp.runtime.chunk import Chunk, OwnName, layer_name

__all__ = ["Model", "build_chunks", "check_layers", "count_layers", "partition_layers"]

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
            f"{a_kind(model)} cannot be cut into layers; {_way(model)}give an "
            "nn.Sequential, a list of layers, or a function that builds the layers of "
            "a range of indices, in zbpp.layers_from(build, n_layers=...)"
        )
    if n_layers is None:
        raise RequestError(
            "a model given as a builder needs n_layers: zbpp.layers_from(build, "
            "n_layers=...)"
        )
    return n_layers


def build_chunks(
    build: Callable[[range], Sequence[nn.Module]],
    ranges: Sequence[range],
    held: Sequence[int],
    *,
    at_once: bool = False,
    own_name: OwnName = layer_name,
) -> list[Chunk]:
    """Make the chunks of one process, those in ``held``.

    With ``at_once``, and all chunks here, ``build`` is called once: so a builder that
    draws weights draws those of the plain model.
    """
    if at_once and len(held) == len(ranges):
        everything = range(ranges[-1].stop)
        layers = _checked(everything, build(everything))
        build = lambda indices: layers[indices.start : indices.stop]  # noqa: E731
    return [
        Chunk(
            i, ranges[i].start, _checked(ranges[i], build(ranges[i])), own_name=own_name
        )
        for i in held
    ]


def _way(model: object) -> str:
    """Name the cut at the longest list of blocks in a module; empty if it has none."""
    if not isinstance(model, nn.Module):
        return ""
    lists = {
        name: len(held)
        for name, held in model.named_modules()
        if name and isinstance(held, nn.ModuleList | nn.Sequential) and len(held) > 1
    }
    if not lists:
        return ""
    longest = max(lists, key=lambda name: lists[name])
    return f"cut it at its blocks, zbpp.cut(model, {longest!r}, example=batch), or "


def check_layers(layers: Iterable[tuple[int, object]]) -> None:
    """Refuse layers, which come with their global indices, that are no modules."""
    for index, layer in layers:
        if not isinstance(layer, nn.Module):
            name = getattr(layer, "__name__", repr(layer))
            raise RequestError(
                f"layer {index} is {a_kind(layer)} ({name}), no nn.Module; give a "
                "module in its place, such as nn.ReLU() for torch.relu"
            )


def _checked(layers: range, built: Sequence[nn.Module]) -> tuple[nn.Module, ...]:
    if len(built) != len(layers):
        raise RequestError(
            f"the builder made {len(built)} layers for {layers}, not {len(layers)}"
        )
    check_layers(enumerate(built, start=layers.start))
    return tuple(built)
