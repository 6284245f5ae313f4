"""Models of transformers, and of peft, as layers, by their plans or their families.

    llama   model.embed_tokens | model.layers.0 .. | model.norm, lm_head
            base_model_pp_plan   base_model_pp_plan   the rest beside the base model

A batch is what the model takes: a dict with input_ids, attention_mask, labels. The loss
is the model's own.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.models.cut import CutModel, cut_at
from zbpp.models.families import Family, family_of
from zbpp.models.frame import children_on_path, persistent
from zbpp.models.layered import Layered
from zbpp.models.recorded import Collector
from zbpp.models.weights import Source, Weights, is_on_meta
from zbpp.runtime.microbatches import IGNORED, Weigh

__all__ = [
    "base_of",
    "cut_batch",
    "cut_pretrained",
    "family_for",
    "is_peft",
    "is_pretrained",
    "own_loss",
]

_OFF = ("use_cache", "output_hidden_states", "output_attentions")


def is_pretrained(model: object) -> bool:
    """True for a model of transformers; loads nothing."""
    return _is_of(model, "transformers", "PreTrainedModel")


def is_peft(model: object) -> bool:
    """True for a `PeftModel`; loads nothing."""
    return _is_of(model, "peft", "PeftModel")


def _is_of(model: object, package: str, name: str) -> bool:
    return any(
        kind.__name__ == name and kind.__module__.startswith(package)
        for kind in type(model).__mro__
    )


def base_of(model: Any) -> tuple[str, nn.Module]:
    """The wrapped model with the adapters in it, and the prefix of its names.

    Raises:
        RequestError: the adapter is a prompt, which lies in the wrapper.
    """
    for config in model.peft_config.values():
        if config.is_prompt_learning:
            raise RequestError(
                f"peft's {config.peft_type} puts a prompt before the model, in a "
                "forward of its own that a pipeline does not run; use an adapter "
                "inside of layers, such as LoRA"
            )
    base: nn.Module = model.get_base_model()
    prefix = next(name for name, held in model.named_modules() if held is base)
    return f"{prefix}.", base


Named = tuple[str, Sequence[str], Sequence[str]]
"""Path of the blocks, and names of what runs before and after them."""


def cut_pretrained(
    model: Any,
    weights: Source | None = None,
    named: Named | None = None,
    example: Any = None,
) -> Layered:
    """Cut a model of transformers as its plan or its family says.

    Args:
        model: with weights, or on the meta device.
        weights: of a model on meta.
        named: names in place of the plan's or the family's.
        example: a batch, if it is not one of tokens.

    Raises:
        RequestError: the model has neither a plan nor a family, or needs weights.
    """
    family = Family("", ()) if named else family_for(model)
    blocks, before, after = named or _names(model, family)
    if example is None:
        tokens = torch.ones(1, 4, dtype=torch.long)
        example = {"input_ids": tokens}
        if getattr(model.config, "is_encoder_decoder", False):
            example["decoder_input_ids"] = tokens
    at = cut_at(model, blocks, before, after, example)
    made = None
    if is_on_meta(model):
        if weights is None:
            raise RequestError(
                f"this {type(model).__name__} is on the meta device; say where its "
                "weights come from: zbpp.cut(model, weights=FOLDER), a state dict, or "
                "a seed"
            )
        made = Weights(model, weights, _Init(model))
    cut = CutModel(
        model,
        at,
        made,
        only_front=family.only_front,
        collector=_collector(model),
        adapt=_adapt,
    )
    return cut.layered(loss_fn=own_loss, cut_batch=cut_batch, weigh=_weigh_of(model))


def family_for(model: Any) -> Family:
    """The registered family of a model, or the one that its plan tells.

    Raises:
        RequestError: it has neither.
    """
    config = model.base_model.config
    if (family := family_of(config.model_type)) is not None:
        return family
    plan: Mapping[str, Any] = getattr(config, "base_model_pp_plan", None) or {}
    names = list(plan)
    lists = [
        name
        for name in names
        if isinstance(getattr(model.base_model, name, None), nn.ModuleList)
    ]
    if len(lists) != 1:
        raise RequestError(
            f"{type(model).__name__} ({config.model_type}) has no base_model_pp_plan "
            "with one list of blocks, and no family is registered for it; use "
            "zbpp.cut(model, 'path.of.blocks'), or zbpp.models.register"
        )
    at = names.index(lists[0])
    return Family(lists[0], tuple(names[:at]), tuple(names[at + 1 :]))


def own_loss(outputs: Any, targets: Any) -> Tensor:
    """The loss that the model has computed in its last layer.

    Raises:
        RequestError: the batch had no labels.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else None
    if loss is None:
        raise RequestError(
            "the model's own loss needs labels in the batch; give them, or a loss_fn"
        )
    model_loss: Tensor = loss
    return model_loss


def cut_batch(batch: Any) -> tuple[Any, Any]:
    """From a batch as the model takes it to inputs and targets.

    Raises:
        RequestError: the batch is no dict.
    """
    if not isinstance(batch, Mapping):
        raise RequestError(
            f"the batch is a {type(batch).__name__}; a model of transformers takes a "
            "dict with input_ids, attention_mask, labels"
        )
    inputs = {key: held for key, held in batch.items() if held is not None}
    return inputs, inputs.get("labels")


@dataclass(frozen=True)
class _Init:
    """Initialises modules as their model of transformers does."""

    model: Any

    def __call__(self, name: str, module: nn.Module) -> None:
        owner = self.model
        held: Any = self.model
        for part in name.split(".") if name else ():
            held = held._modules[part]
            owner = held if is_pretrained(held) else owner
        owner._init_weights(module)


def _names(model: Any, family: Family) -> Named:
    """A family's names in a model: those that it has, and its heads."""
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    blocks = f"{prefix}{family.blocks}"
    there = dict(children_on_path(model, blocks))
    before = [name for n in family.before if (name := f"{prefix}{n}") in there]
    after = [name for n in family.after if (name := f"{prefix}{n}") in there]
    if prefix:
        heads = (name for name in there if not name.startswith(prefix))
        after += [name for name in heads if persistent(there[name])]
    return blocks, before, after


def _collector(model: Any) -> Collector | None:
    """Of the router logits, where the configuration asks for them."""
    if not getattr(model.config, "output_router_logits", False):
        return None
    spec = (model.base_model._can_record_outputs or {}).get("router_logits")
    if spec is None:
        raise RequestError(
            f"output_router_logits is set, but {type(model).__name__} does not say "
            "which modules put them out"
        )
    kind = getattr(spec, "target_class", spec)
    return Collector(kind, getattr(spec, "index", 1))


def _adapt(copied: nn.Module) -> None:
    """Turn off what a training step does not need, on a copy of the configuration."""
    config = getattr(copied, "config", None)
    if config is None:
        return
    config = copy.copy(config)
    for name in _OFF:
        if hasattr(config, name):
            setattr(config, name, False)
    copied.__dict__["config"] = config


def _count_next_tokens(labels: Any) -> float:
    """Tokens that a causal loss predicts: it has no prediction of the first one."""
    return float((labels[..., 1:] != IGNORED).sum())


def _count_labels(labels: Any) -> float:
    """Labels of tokens that are not left out."""
    return float((labels != IGNORED).sum())


def _weigh_of(model: Any) -> Weigh | None:
    """Count, from its labels, what a model takes the mean of its loss over.

    A batch's loss is then that of the plain model on the whole batch, however its
    padding is spread over the micro-batches. None: samples.
    """
    kind = type(model).__name__
    from_states = getattr(model.config, "is_encoder_decoder", False)
    if from_states and kind.endswith(("ForConditionalGeneration", "MTModel")):
        return _count_labels  # a decoder's labels are its inputs shifted already
    causal = "LMHeadModel" in kind  # such a class has no loss_type, and takes this one
    loss_type = model.loss_type or ("ForCausalLM" if causal else None)
    return _BY_TOKENS.get(loss_type)


_BY_TOKENS: dict[str | None, Weigh] = {
    "ForCausalLM": _count_next_tokens,
    "ForMaskedLM": _count_labels,
    "ForTokenClassification": _count_labels,
}
