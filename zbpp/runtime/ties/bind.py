"""Give each layer that uses a tied parameter an alias of it, on the same memory.

    layer 0   weight               gradient of layer 0's uses
    layer 5   alias of weight      gradient of layer 5's uses

All layers of a process share the memory, whatever its stages: only the stage of the
first layer steps it, when the passes of all others are over. When the pipeline ends,
`StageTies.end` ties the layers to one parameter again.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from zbpp.core import RequestError
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.support.sharded import layout_of
from zbpp.runtime.ties.plan import TiePlan
from zbpp.runtime.ties.stage import StageTies, TiedParameter


def bind_ties(
    plan: TiePlan, stages: Mapping[int, Sequence[Chunk]]
) -> dict[int, StageTies]:
    """Bind the ties of the stages of this process."""
    chunks = [chunk for of_stage in stages.values() for chunk in of_stage]
    layers = {index: layer for chunk in chunks for index, layer in chunk.numbered()}
    _refuse_other_ties(chunks, plan)
    tied: dict[int, dict[int, TiedParameter]] = {stage: {} for stage in stages}
    for number, tie in enumerate(plan.ties):
        stepped: nn.Parameter | None = None
        modules: dict[nn.Module, int] = {}
        for index, name in tie:
            if index not in layers:
                continue
            parameter = _parameter(layers[index], index, name)
            if stepped is None:
                stepped = leaf = parameter
            else:
                _refuse_other_kind(parameter, stepped, plan.name(number))
                leaf = _alias_of(stepped)
            here = tied[plan.stage_of(index)].setdefault(number, TiedParameter(stepped))
            here.leaves[index] = leaf
            for module, key in _places(layers[index], parameter):
                _refuse_shared(module, name, modules.setdefault(module, index), index)
                setattr(module, key, leaf)
                here.places.append((module, key, leaf))
    return {stage: StageTies(stage, plan, tied[stage]) for stage in stages}


def _refuse_other_ties(chunks: Sequence[Chunk], plan: TiePlan) -> None:
    """Refuse a parameter in two chunks: it would be trained twice, and drift apart."""
    named = {place for tie in plan.ties for place in tie}
    first_places: dict[nn.Parameter, tuple[int, int, str, bool]] = {}
    for chunk in chunks:
        for index, layer in chunk.numbered():
            tied = {_parameter(layer, *place) for place in named if place[0] == index}
            for name, p in layer.named_parameters():
                here = chunk.index, index, name, p in tied
                first = first_places.setdefault(p, here)
                if first[0] != chunk.index and not (first[3] and p in tied):
                    raise RequestError(
                        f"layers {first[1]} and {index} share a parameter ({first[2]} "
                        f"is {name}) but are in chunks {first[0]} and {chunk.index}; "
                        "name the parameter in zbpp.layers_from(..., ties=...), put "
                        "them into one chunk by split=..., or untie them"
                    )


def _parameter(layer: nn.Module, index: int, name: str) -> nn.Parameter:
    try:
        return layer.get_parameter(name)
    except AttributeError as error:
        raise RequestError(
            f"layer {index} has no parameter {name} to be tied: {error}"
        ) from error


def _alias_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return another parameter on the same memory."""
    return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)


def _places(
    layer: nn.Module, parameter: nn.Parameter
) -> Iterator[tuple[nn.Module, str]]:
    for module in layer.modules():
        for key, p in list(module._parameters.items()):
            if p is parameter:
                yield module, key


def _refuse_other_kind(a: nn.Parameter, b: nn.Parameter, tie: str) -> None:
    kinds = {(p.shape, p.dtype, *layout_of(p)) for p in (a, b)}
    if len(kinds) > 1:
        raise RequestError(
            f"the parameters of the tie {tie} differ in shape, dtype or the parts of "
            "their processes; a tied parameter is the same in all layers, so shard it "
            "alike in all layers"
        )


def _refuse_shared(module: nn.Module, name: str, first: int, index: int) -> None:
    if first != index:
        raise RequestError(
            f"layers {first} and {index} share the {type(module).__name__} with "
            f"{name}; give each layer a separate module, and let these share the "
            "parameter"
        )
