"""Where the blocks of a kind of model are, by the `model_type` of its configuration.

A causal language model of transformers with a `base_model_pp_plan` needs no family;
others have a row here, or are added in a script:

    zbpp.models.register("mine", Family("decoder.layers", ("embed",), ("norm",)))
"""

from dataclasses import dataclass

__all__ = ["Family", "family_of", "register"]


@dataclass(frozen=True)
class Family:
    """Names in a model's base model; heads beside it run after the blocks.

    Args:
        blocks: path of the list of blocks.
        before: modules and parameters that are used before the first block.
        after: those that are used after the last one.
        only_front: entries of a batch that are used before the first block only.
    """

    blocks: str
    before: tuple[str, ...]
    after: tuple[str, ...] = ()
    only_front: tuple[str, ...] = ()


_GPT2 = Family("h", before=("wte", "wpe", "drop"), after=("ln_f",))
_BERT = Family(
    "encoder.layer", before=("embeddings", "embeddings_project"), after=("pooler",)
)
_VIT = Family(
    "layers",
    before=("embeddings",),
    after=("layernorm", "pooler"),
    only_front=("pixel_values", "bool_masked_pos"),
)
"""Patches in place of tokens: the image itself stays with the first layer."""

# Of encoders with decoders, the decoder is cut, and the first layer runs the whole
# encoder: its states travel with the hidden state, as all blocks read them. What else
# runs before the blocks and after them is found by a run.
_BART = Family("decoder.layers", ())
_T5 = Family("decoder.block", ())

_FAMILIES: dict[str, Family] = {
    "gpt2": _GPT2,
    **dict.fromkeys(("bert", "roberta", "camembert", "xlm-roberta", "electra"), _BERT),
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian"), _BART),
    **dict.fromkeys(("t5", "mt5"), _T5),
    "vit": _VIT,
}


def register(model_type: str, family: Family) -> None:
    """Add a family, or replace one."""
    _FAMILIES[model_type] = family


def family_of(model_type: str) -> Family | None:
    """The family of a kind of model; None: there is none."""
    return _FAMILIES.get(model_type)
