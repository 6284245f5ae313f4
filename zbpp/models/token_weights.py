"""The number of tokens that a model's own loss is a mean over.

A batch's loss is then that of the plain model on the whole batch, however its padding
is spread over the micro-batches.
"""

from typing import Any

from zbpp.runtime.microbatches import IGNORED, Weigh

__all__ = ["count_labels", "count_next_tokens", "weigh_of"]


def count_next_tokens(labels: Any) -> float:
    """Tokens that a causal loss predicts: it has no prediction of the first one."""
    return float((labels[..., 1:] != IGNORED).sum())


def count_labels(labels: Any) -> float:
    """Labels of tokens that are not left out."""
    return float((labels != IGNORED).sum())


def weigh_of(model: Any) -> Weigh | None:
    """Tell what a model of transformers takes the mean of its loss over.

    Returns:
        A function of the labels; None: samples.
    """
    kind = type(model).__name__
    from_states = getattr(model.config, "is_encoder_decoder", False)
    if from_states and kind.endswith(("ForConditionalGeneration", "MTModel")):
        return count_labels  # a decoder's labels are its inputs shifted already
    causal = "LMHeadModel" in kind  # such a class has no loss_type, and takes this one
    loss_type = model.loss_type or ("ForCausalLM" if causal else None)
    return _BY_TOKENS.get(loss_type)


_BY_TOKENS: dict[str | None, Weigh] = {
    "ForCausalLM": count_next_tokens,
    "ForMaskedLM": count_labels,
    "ForTokenClassification": count_labels,
}
