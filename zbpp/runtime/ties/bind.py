"""Make each tied parameter one tensor a stage, with a gradient for each layer.

    layer 0   weight                gradient of layer 0's uses
    layer 5   alias of weight       gradient of layer 5's uses

Both are one memory. The alias stands in the layer only while its forward runs, so that
the model is the user's own at any other time.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace

from torch import nn

from zbpp.core import RequestError
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.support.marks import mark
from zbpp.runtime.support.sharded import layout_of
from zbpp.runtime.ties.plan import TiePlan
from zbpp.runtime.ties.stage import HeldTie, Source, StageTies

__all__ = ["AliasedLayer", "bind_ties"]

Leaves = dict[int, dict[nn.Parameter, nn.Parameter]]


def bind_ties(
    plan: TiePlan, stages: Mapping[int, Sequence[Chunk]]
) -> dict[int, tuple[list[Chunk], StageTies]]:
    """Bind the ties of the stages of this process.

    A list of layers holds a tied parameter as one object. The stage of the first layer
    steps it; each further stage of the same process gets a copy that only its forwards
    see. Layers of one stage that a builder has made apart get one tensor.

    Args:
        plan: of the whole model.
        stages: chunks of each stage of this process, on their device.

    Raises:
        RequestError: a layer has no such parameter, or parameters of a tie differ in
            shape, dtype or layout.
    """
    layers = {
        index: layer
        for chunks in stages.values()
        for chunk in chunks
        for index, layer in chunk.numbered()
    }
    leaves: Leaves = {}
    owners: dict[nn.Parameter, nn.Parameter] = {}
    held: dict[int, list[HeldTie]] = {stage: [] for stage in stages}
    for number, tie in enumerate(plan.ties):
        sources: dict[nn.Parameter, Source] = {}
        kinds = set()
        for stage in plan.stages(number):
            names = {
                layer: name
                for layer, name in tie
                if plan.placement.stage_of[plan.chunk_of(layer)] == stage
            }
            if stage in stages:
                given = [_parameter(layers[at], at, name) for at, name in names.items()]
                kinds |= {(p.shape, p.dtype, *layout_of(p)) for p in given}
                tied = _hold(number, names, layers, sources, leaves)
                owners.update(dict.fromkeys(tied.leaves.values(), tied.parameter))
                held[stage].append(tied)
        if len(kinds) > 1:
            raise RequestError(
                f"the parameters of the tie {plan.name(number)} differ in shape, dtype "
                "or the parts of their processes; a tied parameter is the same in all "
                "layers, so deal it out alike in all layers"
            )
    return {
        stage: (
            [_with_leaves(chunk, leaves, owners) for chunk in chunks],
            StageTies(stage, plan, held[stage]),
        )
        for stage, chunks in stages.items()
    }


def _hold(
    number: int,
    names: Mapping[int, str],
    layers: Mapping[int, nn.Module],
    sources: dict[nn.Parameter, Source],
    leaves: Leaves,
) -> HeldTie:
    """Bind one tie on one stage.

    Args:
        number: of the tie.
        names: of the parameter in the layers of the stage.
        layers: of this process.
        sources: the tie's parameters that stages of this process hold already.
        leaves: what stands in for parameters, by layer; gets this tie's.
    """
    first = next(iter(names))
    in_model = _parameter(layers[first], first, names[first])
    stepped = in_model
    if in_model in sources:  # an earlier stage of this process steps the model's own
        stepped = nn.Parameter(
            in_model.detach().clone(), requires_grad=in_model.requires_grad
        )
    source = sources.setdefault(in_model, Source(in_model, mark(in_model)))
    tied_leaves: dict[int, nn.Parameter] = {}
    for layer, name in names.items():
        parameter = _parameter(layers[layer], layer, name)
        if parameter is not in_model:
            _replace(layers[layer], parameter, in_model)
        leaf = stepped if layer == first else _alias_of(stepped)
        tied_leaves[layer] = leaf
        if leaf is not in_model:
            leaves.setdefault(layer, {})[in_model] = leaf
    return HeldTie(number, stepped, tied_leaves, source)


def _parameter(layer: nn.Module, index: int, name: str) -> nn.Parameter:
    try:
        return layer.get_parameter(name)
    except AttributeError as error:
        raise RequestError(
            f"layer {index} has no parameter {name} to be tied: {error}"
        ) from error


def _with_leaves(
    chunk: Chunk, leaves: Leaves, owners: Mapping[nn.Parameter, nn.Parameter]
) -> Chunk:
    aliased = {index: leaves[index] for index, _ in chunk.numbered() if index in leaves}
    calls = {
        index: AliasedLayer(layer, aliased[index], owners)
        for index, layer in chunk.numbered()
        if index in aliased
    }
    return replace(chunk, leaves=aliased, calls=calls)


def _alias_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return another parameter on the same memory."""
    return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)


def _replace(layer: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put a parameter in the place, or places, of another."""
    for module, name in _places(layer, old):
        setattr(module, name, new)


def _places(layer: nn.Module, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
    return [
        (module, name)
        for module in layer.modules()
        for name, held in module._parameters.items()
        if held is parameter
    ]


class AliasedLayer:
    """Runs a layer with other parameters in the places of some.

    Args:
        layer: any module.
        leaves: what stands in for its parameters.
        owners: of each leaf, the parameter whose memory it shares.
    """

    def __init__(
        self,
        layer: nn.Module,
        leaves: Mapping[nn.Parameter, nn.Parameter],
        owners: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        self._call: Callable[[object], object] = layer
        self._pairs = [(leaf, owners[leaf]) for leaf in leaves.values()]
        self._places = [
            (*place, parameter, leaf)
            for parameter, leaf in leaves.items()
            for place in _places(layer, parameter)
        ]

    def running(self, call: Callable[[object], object]) -> "AliasedLayer":
        """Return the same with something else that runs the layer."""
        layer = copy(self)
        layer._call = call
        return layer

    def __call__(self, value: object) -> object:
        """Run the forward."""
        for leaf, owner in self._pairs:
            _follow(leaf, owner)
        try:
            for module, name, _, leaf in self._places:
                setattr(module, name, leaf)
            output = self._call(value)
        finally:
            for module, name, parameter, _ in self._places:
                setattr(module, name, parameter)
        return output


def _follow(leaf: nn.Parameter, owner: nn.Parameter) -> None:
    """Let an alias share the owner's memory and freezing, should these have changed."""
    if leaf is owner:
        return
    if leaf.untyped_storage()._cdata != owner.untyped_storage()._cdata:
        leaf.data = owner.data
    if leaf.requires_grad != owner.requires_grad:
        leaf.requires_grad_(owner.requires_grad)
