"""Batches and losses of models of transformers, and the model in a wrapper of peft.

A batch is what the model takes: a dict with input_ids, attention_mask, labels. The loss
is that of the model.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.runtime.microbatches import IGNORED, Weigh


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
                "forward that a pipeline does not run; use an adapter "
                "inside of layers, such as LoRA"
            )
    base: nn.Module = model.get_base_model()
    prefix = next(name for name, part in model.named_modules() if part is base)
    return f"{prefix}.", base


def _model_loss(outputs: Any, targets: Any) -> Tensor:
    """The loss that the model has computed in its last layer.

    Raises:
        RequestError: the batch had no labels.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else None
    if loss is None:
        raise RequestError(
            "the model's loss needs labels in the batch; give them, or a loss_fn"
        )
    value: Tensor = loss
    return value


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
    inputs = {key: value for key, value in batch.items() if value is not None}
    return inputs, inputs.get("labels")


def _count_next_tokens(labels: Any) -> float:
    """Tokens that a causal loss predicts: it has no prediction of the first one."""
    return float((labels[..., 1:] != IGNORED).sum())


def _count_labels(labels: Any) -> float:
    """Labels of tokens that are not left out."""
    return float((labels != IGNORED).sum())


def _weigh_of(model: Any) -> Weigh | None:
    """Return the function that counts the labels in the mean of a model's loss.

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


def losses_of(model: nn.Module) -> dict[str, Any]:
    """The batch and the loss of a model of transformers, as fields of `Layered`."""
    functions = {"loss_fn": _model_loss, "cut_batch": cut_batch}
    return {**functions, "weigh": _weigh_of(model)}


def initialiser_of(model: Any) -> Callable[[str, nn.Module], None]:
    """Return a function that initialises a module as its model does."""

    def initialise(name: str, module: nn.Module) -> None:
        owner = part = model
        for key in name.split(".") if name else ():
            part = part._modules[key]
            owner = part if is_pretrained(part) else owner
        owner._init_weights(module)

    return initialise
