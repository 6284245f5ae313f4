"""Families of models, by the `model_type` of their configuration.

A causal language model of transformers with a `base_model_pp_plan` needs none; others
have a file in families/, or are added in a script:

    zbpp.models.register("mine", Family("decoder.layers", ("embed",), ("norm",)))
"""

from zbpp.models.families import BART, BERT, GPT2, T5, VIT
from zbpp.models.family import Family

__all__ = ["family_of", "register"]

_FAMILIES: dict[str, Family] = {
    "gpt2": GPT2,
    **dict.fromkeys(("bert", "roberta", "camembert", "xlm-roberta", "electra"), BERT),
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian"), BART),
    **dict.fromkeys(("t5", "mt5"), T5),
    "vit": VIT,
}


def register(model_type: str, family: Family) -> None:
    """Add a family, or replace one."""
    _FAMILIES[model_type] = family


def family_of(model_type: str) -> Family | None:
    """The family of a kind of model; None: there is none."""
    return _FAMILIES.get(model_type)
