"""The layers of each chunk in a run, and the costs per layer that say them."""

from zbpp.core import (
    LayerCosts,
    Placement,
    RequestError,
    Schedule,
    is_layers_file,
    read_layers,
)
from zbpp.core.costs.units import with_limit
from zbpp.models.configs.text_model import TextModel
from zbpp.planning.pipelines import split_of, split_on
from zbpp.planning.request import parse_recompute, parse_split
from zbpp.runtime.partition import partition_layers
from zbpp.schedules import Recomputing, Split
from zbpp.training.options import Train

__all__ = [
    "asked_recompute",
    "asked_split",
    "layers_of",
    "placed_split",
    "run_split",
    "sleeping_layers",
    "split_layers",
]


def layers_of(options: Train, n_layers: int) -> LayerCosts | None:
    """Costs per layer to plan for; None: there are none.

    Args:
        options: of the run.
        n_layers: layers of the model, if the run is not emulated.

    Raises:
        RequestError: the file is not valid, is for another model, or comes on top of
            a costs file.
    """
    if options.layers is None:
        layers = sleeping_layers(options)
    else:
        if options.costs is not None:
            raise RequestError(
                "--costs and --layers are both given; the costs of chunks follow from "
                "those of layers: leave --costs out"
            )
        layers = read_layers(options.layers)
        if options.emulate is None and layers.n_layers != n_layers:
            raise RequestError(
                f"{options.layers}: it has costs of {layers.n_layers} layers, but the "
                f"model has {n_layers} (--n_blocks, embedding and head); profile this "
                "model"
            )
    if layers is None:
        return None
    return with_limit(layers, options.memory_limit, name="--memory_limit")


def sleeping_layers(options: Train) -> LayerCosts | None:
    """Layers that sleep in place of a model; None: chunks do, or nothing does.

    Raises:
        RequestError: the file is not valid.
    """
    if options.emulate is None or not is_layers_file(options.emulate):
        return None
    return read_layers(options.emulate)


def asked_split(options: Train) -> Split:
    """Read what ``--split`` asks for.

    Raises:
        RequestError: it is no split.
    """
    return None if options.split is None else parse_split(options.split)


def asked_recompute(options: Train) -> Recomputing | None:
    """Read what ``--recompute`` asks for.

    Raises:
        RequestError: it is none of what it may be.
    """
    return None if options.recompute is None else parse_recompute(options.recompute)


def placed_split(
    options: Train, model: TextModel, placement: Placement
) -> tuple[int, ...]:
    """Layers of each chunk of a placement, where no costs of layers are given.

    Raises:
        RequestError: they do not fit the model.
    """
    asked, n_layers = asked_split(options), model.n_layers
    if asked is None:
        return tuple(split_layers(model, placement.n_chunks))
    counts = split_on(asked, n_layers, placement)
    chunks = partition_layers(n_layers, placement.n_chunks, counts)
    return tuple(map(len, chunks))


def run_split(options: Train, schedule: Schedule, model: TextModel) -> tuple[int, ...]:
    """Layers of each chunk: those asked for, or the schedule's, or equal blocks.

    Raises:
        RequestError: they do not fit the model.
    """
    asked_alone = options.split is not None and options.layers is None
    if schedule.split is None or asked_alone:
        return placed_split(options, model, schedule.placement)
    return split_of(schedule, None, model.n_layers)  # planned with it


def split_layers(model: TextModel, n_chunks: int) -> list[int]:
    """Layers of each chunk: even numbers of blocks, then embedding and head.

    Embedding and head do far less work than a block, so they come on top of the
    first and the last chunk's share, unless there are too few blocks for that.

    >>> from zbpp.training.llama import LlamaConfig
    >>> split_layers(LlamaConfig(n_blocks=8), 4)
    [3, 2, 2, 3]

    Raises:
        RequestError: there are more chunks than layers.
    """
    if model.n_blocks < n_chunks:
        return [len(layers) for layers in partition_layers(model.n_layers, n_chunks)]
    counts = [len(blocks) for blocks in partition_layers(model.n_blocks, n_chunks)]
    counts[0] += 1
    counts[-1] += 1
    return counts
