"""Assign a model's layers to chunks, and build only those that are needed here."""

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from zbpp.core import RequestError, a_kind
from zbpp.runtime.chunk import Chunk, OwnName, layer_name


def build_chunks(
    build: Callable[[range], Sequence[nn.Module]],
    ranges: Sequence[range],
    chunks: Sequence[int],
    *,
    at_once: bool = False,
    own_name: OwnName = layer_name,
) -> list[Chunk]:
    """Make the chunks of one process, those numbered in ``chunks``.

    With ``at_once``, and all chunks here, ``build`` is called once: so a builder that
    draws weights draws those of the plain model.
    """
    if at_once and len(chunks) == len(ranges):
        everything = range(ranges[-1].stop)
        layers = _checked(everything, build(everything))
        build = lambda indices: layers[indices.start : indices.stop]  # noqa: E731
    return [
        Chunk(
            i, ranges[i].start, _checked(ranges[i], build(ranges[i])), own_name=own_name
        )
        for i in chunks
    ]


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
