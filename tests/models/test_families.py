"""Every family of transformers that carries a plan is cut, without any weights."""

from typing import Any

import pytest
import torch

import zbpp

pytestmark = [
    pytest.mark.needs("transformers"),
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]

REFUSED = {
    "DeepseekV4Config": "hidden states of several streams go into its blocks",
    "EmbeddingGemma2TextConfig": "embeddings of each layer beside the first one",
    "EsmcConfig": "takes no inputs_embeds",
    "Gemma3nTextConfig": "embeddings of each layer beside the first one",
    "Glm4vMoeTextConfig": "its default configuration does not run",
    "Glm4vTextConfig": "its default configuration does not run",
    "Glm5NextTextConfig": "blocks hand indices to one another",
    "GlmImageTextConfig": "its default configuration does not run",
    "GlmMoeDsaConfig": "blocks hand indices to one another",
    "HrmTextConfig": "two lists of blocks, which run in turns",
    "HYV4Config": "hidden states of several streams go into its blocks",
    "HYV4VLTextConfig": "hidden states of several streams go into its blocks",
    "LongcatFlashConfig": "one block",
    "MistralLarge4TextConfig": "blocks hand indices to one another",
}
"""Configurations whose models are not cut, with the reason; an example cuts most."""


def model_of(kind: Any) -> Any:
    """A model on meta, small if its configuration lets itself be made so; or None."""
    from transformers import AutoModel, AutoModelForCausalLM

    for n_layers in (2, 4, 6, None):
        for auto in (AutoModelForCausalLM, AutoModel):
            try:
                settings: dict[str, Any] = (
                    {"num_hidden_layers": n_layers} if n_layers else {}
                )
                config = kind(**settings)
                if settings and getattr(config, "layer_types", None):
                    settings["layer_types"] = config.layer_types[:n_layers]
                with torch.device("meta"):
                    return auto.from_config(kind(**settings))
            except Exception:  # of the configuration, whatever it may be
                continue
    return None


def test_every_family_with_a_plan_is_cut_or_refused_by_name() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    kinds = {
        kind.__name__: kind
        for kind in transformers.CONFIG_MAPPING.values()
        if vars(kind).get("base_model_pp_plan")
    }
    n_cut, refused = 0, {}
    for name, kind in kinds.items():
        if (model := model_of(kind)) is None:
            continue
        try:
            layered = zbpp.cut(model, weights=0)
        except zbpp.RequestError as error:
            refused[name] = str(error)
            continue
        names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
        assert {layered.own_name(*end) for tie in layered.ties for end in tie} <= names
        assert layered.n_layers >= 3, "one has two layers in a block"
        n_cut += 1
    assert refused.keys() <= REFUSED.keys(), refused
    assert n_cut >= 95
