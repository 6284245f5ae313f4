"""Whatever a user passes as a model, as layers."""

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from zbpp.core import RequestError, a_kind
from zbpp.models.blocks import find_blocks, outer_lists
from zbpp.models.exported import cut_by_export
from zbpp.models.hugging_face import base_of, initialiser_of, is_peft, is_pretrained
from zbpp.models.layered import Layered, of_layers
from zbpp.models.pretrained import cut_pretrained, takes_embeddings
from zbpp.models.weights import Source, Weights, is_on_meta
from zbpp.runtime.partition import check_layers
from zbpp.runtime.support.fsdp import units_in
from zbpp.runtime.ties.plan import Tie

_log = logging.getLogger("zbpp")

AnyModel = Layered | nn.Module | Sequence[nn.Module]
"""A model as `zbpp.Pipeline` takes it."""


def layered_of(model: AnyModel) -> Layered:
    """Take a model as layers.

    Args:
        model: an `nn.Sequential`, a list of layers, a model of transformers, or the
            result of `cut` or `layers_from`.

    Raises:
        RequestError: the model cannot be cut into layers.
    """
    if isinstance(model, Layered):
        return model
    if isinstance(model, nn.Module):
        _look_for_compiled(model)
        if is_peft(model):
            prefix, base = base_of(model)
            return _below(prefix, layered_of(base))
        if is_pretrained(model):
            return cut(model)
    if not isinstance(model, nn.Sequential | nn.ModuleList | Sequence):
        raise _refusal(model)
    layers = list(model)
    check_layers(enumerate(layers))
    names = [f"layers.{index}" for index in range(len(layers))]
    if isinstance(model, nn.Module):
        names = list(model._modules)
    return of_layers(
        layers,
        lambda layer, name: f"{names[layer]}.{name}",
        parts=dict(zip(names, layers, strict=True)),
    )


def _refusal(model: object) -> RequestError:
    """The error for a model that is no list of layers: how to make it one."""
    way = ""
    if isinstance(model, nn.Module):
        if lists := outer_lists(model):
            path = max(lists, key=lambda name: len(lists[name]))
            way = f"cut it at its blocks, zbpp.cut(model, {path!r}, example=batch), or "
    elif callable(model):
        return RequestError(
            "a model given as a builder needs n_layers: zbpp.layers_from(build, "
            "n_layers=...)"
        )
    return RequestError(
        f"{a_kind(model)} cannot be cut into layers; {way}give an nn.Sequential, a "
        "list of layers, or a function that builds the layers of a range of indices, "
        "in zbpp.layers_from(build, n_layers=...)"
    )


def layers_from(
    build: Callable[[range], Sequence[nn.Module]],
    *,
    n_layers: int,
    ties: Sequence[Tie] = (),
) -> Layered:
    """Take the layers of a model from a function, for `zbpp.Pipeline`.

    Each process calls it for its layers only, so no process builds the whole model.

    Args:
        build: makes the layers of a range of indices; the same weights for any range.
        n_layers: number of layers of the whole model.
        ties: parameters that several layers share: ``((layer, name), ...)`` of each.
            A process sees only its layers, so no other process can know them.

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


def cut(
    model: nn.Module,
    blocks: str | None = None,
    *,
    example: Any = None,
    weights: Source | None = None,
) -> Layered:
    """Cut a model into layers at its repeated blocks, for `zbpp.Pipeline`.

    The first layer is the part of the model before its first block, the last layer the
    part after the last block. The blocks must run once each, in order. There are two
    ways; the logger ``zbpp`` names the chosen way:

    * A model of transformers whose forward takes ``inputs_embeds`` runs its
      forward, around other blocks. Batches may have any shapes.
    * Every other module, and every one with an `example`, is exported and split by
      `torch.distributed.pipelining.pipeline`. Micro-batches have the shapes of the
      example.

    Args:
        model: with weights, which are used as they are, or on the meta device.
        blocks: path of the blocks, as in ``"model.layers"``; None: the only list of
            modules, or that of ``num_hidden_layers`` blocks.
        example: a micro-batch: a dict gives keywords, a tuple arguments, all else is
            the argument.
        weights: of a model on meta that is cut by its forward: safetensors (a
            folder or a file), a state dict, or a seed; each process makes those of its
            layers only.

    Raises:
        RequestError: the model cannot be cut so.
    """
    _look_for_compiled(model)
    wrapped = next(units_in(model), None)
    if wrapped is not None:
        raise RequestError(
            f"a {type(wrapped).__name__} is wrapped by fully_shard or replicate; cut "
            "the model first, and wrap its parts then, or pass the bare model and "
            "zbpp.DataParallel(shard=...)"
        )
    if is_peft(model):
        prefix, base = base_of(model)
        blocks = None if blocks is None else blocks.removeprefix(prefix)
        return _below(prefix, cut(base, blocks, example=example, weights=weights))
    kind = type(model).__name__
    if is_on_meta(model) and (weights is None or example is not None):
        raise RequestError(
            f"this {kind} is on the meta device; name the source of its weights: "
            "zbpp.cut(model, weights=FOLDER), a state dict, or a seed. A model that is "
            "cut by export needs a real device"
        )
    path, listed = find_blocks(model, blocks)
    if example is not None:
        layered = cut_by_export(model, example, [*listed.values()])
    elif is_pretrained(model) and takes_embeddings(model):
        source = None
        if weights is not None:
            source = Weights(model, weights, initialiser_of(model))
        layered = cut_pretrained(model, path, listed, source)
    else:
        raise RequestError(
            f"{a_kind(model)} is cut by export, which needs a micro-batch: "
            "zbpp.cut(model, 'path.of.blocks', example=MICRO_BATCH)"
        )
    way = "its forward" if example is None else "torch.export"
    _log.info("%s is cut by %s into %d layers", kind, way, layered.n_layers)
    return layered
