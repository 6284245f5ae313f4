"""Whatever a user gives as a model, as layers."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from zbpp.core import RequestError, a_kind
from zbpp.models.cut import cut_module
from zbpp.models.hugging_face import (
    base_of,
    cut_pretrained,
    is_peft,
    is_pretrained,
)
from zbpp.models.layered import Layered, Tie, layer_name
from zbpp.models.weights import Source, Weights, is_on_meta
from zbpp.runtime.partition import Model, check_layers, count_layers
from zbpp.runtime.ties.plan import find_ties

__all__ = ["Given", "cut", "layered_of", "layers_from", "model_to_build"]

Given = (
    Layered | nn.Module | Sequence[nn.Module] | Callable[[range], Sequence[nn.Module]]
)
"""A model as `zbpp.Pipeline` takes it."""


def layered_of(model: Given, n_layers: int | None = None) -> Layered:
    """Take a model as layers.

    Args:
        model: an `nn.Sequential`, a list of layers, a builder that is called with a
            range of layer indices, a model of transformers, or what `cut` returns.
        n_layers: their number, if the model is a builder.

    Raises:
        RequestError: the model cannot be cut into layers.
    """
    if isinstance(model, Layered):
        if n_layers not in (None, model.n_layers):
            raise RequestError(
                f"n_layers is {n_layers}, but the model has {model.n_layers} layers"
            )
        return model
    if isinstance(model, nn.Module):
        _look_for_compiled(model)
    if is_peft(model):
        prefix, base = base_of(model)
        return _below(prefix, layered_of(base, n_layers))
    if is_pretrained(model):
        return layered_of(cut_pretrained(model), n_layers)
    n = count_layers(model, n_layers)
    if isinstance(model, nn.Sequential | nn.ModuleList | Sequence):
        layers = list(model)
        check_layers(enumerate(layers))
        keys = list(model._modules) if isinstance(model, nn.Module) else None
        names = keys or [f"layers.{index}" for index in range(n)]
        return Layered(
            n,
            lambda indices: [layers[i] for i in indices],
            parts=dict(zip(names, layers, strict=True)),
            own_name=layer_name if keys is None else _named_by(keys),
            ties=find_ties(layers),
        )
    return Layered(n, model)


def layers_from(
    build: Callable[[range], Sequence[nn.Module]],
    *,
    n_layers: int,
    ties: Sequence[Tie] = (),
) -> Layered:
    """Take the layers of a model from a function, for `zbpp.Pipeline`.

    Each process calls it for its own layers only, so no process holds the whole model.

    Args:
        build: makes the layers of a range of indices; the same weights for any range.
        n_layers: number of layers of the whole model.
        ties: parameters that several layers share: ``((layer, name), ...)`` of each.
            A process sees its own layers only, so nobody else can know them.

    Raises:
        RequestError: build is no function.
    """
    if isinstance(build, nn.Module | Sequence) or not callable(build):
        raise RequestError(
            f"build is {a_kind(build)}; give a function that makes the layers of a "
            "range of indices"
        )
    places = tuple(tuple((layer, name) for layer, name in tie) for tie in ties)
    return Layered(n_layers, build, ties=places)


def model_to_build(model: Given, layered: Layered) -> Model:
    """Return what stages are built of: the user's own layers, if they are given."""
    if isinstance(model, nn.Sequential | nn.ModuleList | Sequence):
        return model
    return layered.build


def _below(prefix: str, layered: Layered) -> Layered:
    """The same layers with the names that they have below a wrapper."""
    name = layered.own_name
    return replace(layered, own_name=lambda i, there: f"{prefix}{name(i, there)}")


def _look_for_compiled(model: nn.Module) -> None:
    """Refuse a compiled wrapper; warn of a compiled forward that never runs.

    Raises:
        RequestError: `torch.compile` has wrapped the model.
    """
    inner = getattr(model, "_orig_mod", None)
    if inner is not None:
        raise RequestError(
            f"torch.compile has wrapped this {type(inner).__name__} as a whole; give "
            'the model that it was called with, and compile="blocks" '
            "in execution=zbpp.Execution(...)"
        )
    if model._compiled_call_impl is not None:
        warnings.warn(
            f"this {type(model).__name__} is compiled as a whole, by model.compile(), "
            "and a pipeline calls its layers only, which are not compiled; leave "
            'that out, and give compile="blocks" in execution=zbpp.Execution()',
            stacklevel=4,
        )


def _named_by(keys: list[str]) -> Callable[[int, str], str]:
    def own_name(layer: int, name: str) -> str:
        return f"{keys[layer]}.{name}"

    return own_name


def cut(
    model: nn.Module,
    blocks: str | None = None,
    *,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
    example: Any = None,
    weights: Source | None = None,
) -> Layered:
    """Cut a model into layers at its repeated blocks, for `zbpp.Pipeline`.

    The first layer is what the model's forward does before its first block, the last
    one what it does after the last block. The model must call its blocks once each, in
    order, each with the hidden state (first) that the one before has put out.

    Args:
        model: with weights, which are used as they are, or on the meta device.
        blocks: path of the blocks, as in ``"model.layers"``; None: as the model's
            plan or family says.
        before: modules beside the path to the blocks that run before them. One that
            runs before and after (a tied embedding) is named in both.
        after: modules that run after them.
        example: a batch as the model takes it: modules that are not named are found by
            a run on the meta device, which computes nothing.
        weights: of a model on meta: safetensors (a folder or a file), a state dict, or
            a seed; each process makes those of its own layers only.

    Raises:
        RequestError: the model cannot be cut so.
    """
    _look_for_compiled(model)
    if is_peft(model):
        prefix, base = base_of(model)
        blocks = None if blocks is None else blocks.removeprefix(prefix)
        before, after = (
            [name.removeprefix(prefix) for name in names] for names in (before, after)
        )
        return _below(
            prefix,
            cut(
                base,
                blocks,
                before=before,
                after=after,
                example=example,
                weights=weights,
            ),
        )
    if is_pretrained(model):
        named = None if blocks is None else (blocks, before, after)
        return cut_pretrained(model, weights, named, example)
    if blocks is None:
        raise RequestError(
            f"{a_kind(model)} has no plan; name its blocks, as in "
            "zbpp.cut(model, 'encoder.layers')"
        )
    made = None
    if is_on_meta(model):
        if weights is None:
            raise RequestError(
                "the model is on the meta device; say in weights= where its weights "
                "come from: a folder, a state dict, or a seed"
            )
        made = Weights(model, weights)
    return cut_module(
        model, blocks, before=before, after=after, example=example, weights=made
    )
