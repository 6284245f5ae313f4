"""A model as layers, with all that a pipeline has to know of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from zbpp.runtime.chunk import OwnName, layer_name
from zbpp.runtime.loss import LossFn
from zbpp.runtime.microbatches import CutBatch, Weigh
from zbpp.runtime.ties.plan import Tie, find_ties


@dataclass(frozen=True)
class Layered:
    """Layers of a model in forward order; layer i reads the output of layer i - 1.

    Args:
        n_layers: their number.
        build: makes the layers of a range of indices, and allocates the weights of no
            other; the same weights for any range.
        parts: modules of the user's model that the layers consist of, by name; None:
            ``build`` is the user's function.
        own_name: from a layer's index and a name in it to the model's name.
        ties: parameters that are one in the model.
        buffers: those that are one in the model and lie in several layers, each of
            which has a copy; a checkpoint stores them once.
        loss_fn: the model's loss of the last layer's output; None: it has none.
        cut_batch: from a batch as the model takes it to the inputs of the first layer
            and the targets of the loss; None: the user gives both.
        weigh: from the targets of a micro-batch to the number that the model's loss is
            a mean over (for example its tokens); None: its samples.
    """

    n_layers: int
    build: Callable[[range], Sequence[nn.Module]]
    parts: Mapping[str, nn.Module] | None = None
    own_name: OwnName = layer_name
    ties: tuple[Tie, ...] = ()
    buffers: tuple[Tie, ...] = ()
    loss_fn: LossFn | None = None
    cut_batch: CutBatch | None = None
    weigh: Weigh | None = None


def of_layers(
    layers: Sequence[nn.Module],
    own_name: OwnName,
    *,
    parts: Mapping[str, nn.Module],
    build: Callable[[range], Sequence[nn.Module]] | None = None,
    functions: Mapping[str, Any] | None = None,
) -> Layered:
    """Describe layers and their tied parameters.

    Args:
        layers: of a model; on meta, if they have no weights.
        own_name: see `Layered`.
        parts: see `Layered`.
        build: makes layers with weights; None: these have them.
        functions: of the model's loss and batch, by their names in `Layered`.
    """
    return Layered(
        len(layers),
        build or (lambda indices: [layers[i] for i in indices]),
        parts=parts,
        own_name=own_name,
        ties=find_ties(layers),
        buffers=_shared_buffers(layers, own_name),
        **(functions or {}),
    )


def _shared_buffers(layers: Sequence[nn.Module], own_name: OwnName) -> tuple[Tie, ...]:
    """Find the buffers of a checkpoint that lie in several layers."""
    places: dict[str, dict[int, str]] = {}
    for index, layer in enumerate(layers):
        for path, part in layer.named_modules():  # a released one has no state_dict
            for key in part._buffers.keys() - part._non_persistent_buffers_set:
                name = f"{path}.{key}".lstrip(".")
                places.setdefault(own_name(index, name), {})[index] = name
    return tuple(tuple(place.items()) for place in places.values() if len(place) > 1)
