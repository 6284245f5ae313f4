"""Make each tied parameter one tensor a stage, with a gradient for each layer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from zbpp.core import RequestError
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.support.marks import mark
from zbpp.runtime.ties.alias import AliasedLayer, alias_parameter, set_parameter
from zbpp.runtime.ties.plan import TiePlan
from zbpp.runtime.ties.stage import HeldTie, Source, StageTies

__all__ = ["bind_ties"]

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
            shape or dtype.
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
        for stage in plan.stages(number):
            names = {
                layer: name
                for layer, name in tie
                if plan.placement.stage_of[plan.chunk_of(layer)] == stage
            }
            if stage in stages:
                one = _hold(number, names, layers, sources, leaves)
                owners.update(dict.fromkeys(one.leaves.values(), one.own))
                held[stage].append(one)
        if len({(p.shape, p.dtype) for p in sources}) > 1:
            raise RequestError(
                f"the parameters of the tie {plan.name(number)} differ in shape or "
                "dtype; a tied parameter is the same in all layers"
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
    model_own = _parameter(layers[first], first, names[first])
    own = model_own
    if model_own in sources:
        own = nn.Parameter(
            model_own.detach().clone(), requires_grad=model_own.requires_grad
        )
    source = sources.setdefault(model_own, Source(model_own, mark(model_own)))
    its: dict[int, nn.Parameter] = {}
    for layer, name in names.items():
        other = _parameter(layers[layer], layer, name)
        if other is not model_own:
            set_parameter(layers[layer], other, model_own)
        leaf = its[layer] = own if layer == first else alias_parameter(own)
        if leaf is not model_own:
            leaves.setdefault(layer, {})[model_own] = leaf
    return HeldTie(number, own, its, source)


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
    own = {index: leaves[index] for index, _ in chunk.numbered() if index in leaves}
    calls = {
        index: AliasedLayer(layer, own[index], owners)
        for index, layer in chunk.numbered()
        if index in own
    }
    return replace(chunk, leaves=own, calls=calls)
