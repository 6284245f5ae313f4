"""Every family of transformers that carries a plan is cut, without any weights."""

import importlib
import inspect
import pkgutil

import pytest
import torch

import zbpp

pytestmark = [
    pytest.mark.needs("transformers"),
    pytest.mark.xdist_group("hf"),
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
]

UNMADE = {
    *("CohereCompassTextConfig", "DeepseekOcr2TextConfig", "DiffusionGemmaTextConfig"),
    *("Dots1Config", "MinistralConfig", "Qwen3OmniMoeTalkerTextConfig"),
    *("T5Gemma2DecoderConfig", "T5Gemma2TextConfig", "T5GemmaModuleConfig"),
    "VoxtralRealtimeTextConfig",
}
"""No class makes a model of their default configurations."""

UNFIT = {
    "HrmTextConfig": "two lists of blocks, which run in turns",
    "HiggsAudioV2Config": "its embedding decides by values",
    "HYV4Config": "hidden states of several streams go into its blocks",
    "HYV4VLTextConfig": "hidden states of several streams go into its blocks",
    "MistralLarge4TextConfig": "a rotary table in the checkpoint",
    "Qwen3OmniMoeTalkerCodePredictorConfig": "a list of embeddings, used by values",
}
"""Configurations whose models are not cut, with the reason."""


def configurations():
    """Configuration classes with a plan, as transformers is installed."""
    import transformers

    found = {}
    for package in pkgutil.iter_modules(transformers.models.__path__):
        name = f"transformers.models.{package.name}.configuration_{package.name}"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        for kind in vars(module).values():
            own = inspect.isclass(kind) and kind.__module__ == name
            if own and vars(kind).get("base_model_pp_plan"):
                found[kind.__name__] = kind
    return found


def class_of(kind):
    """The causal language model of a configuration, or a model that it is for."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    for mapping in (auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_MAPPING):
        if kind in mapping:
            made = mapping[kind]
            return made[0] if isinstance(made, tuple | list) else made
    name = kind.__module__.replace(".configuration_", ".modeling_")
    models = [
        made
        for made in vars(importlib.import_module(name)).values()
        if inspect.isclass(made) and getattr(made, "config_class", None) is kind
    ]
    return next(m for m in models if not m.__name__.endswith("PreTrainedModel"))


def model_of(kind):
    """A model on meta, small if its configuration lets itself be made so."""
    made, error = class_of(kind), None
    for n_layers in (2, 4, 6, None):
        try:
            settings = {"num_hidden_layers": n_layers} if n_layers else {}
            config = kind(**settings)
            if settings and getattr(config, "layer_types", None):
                config = kind(**settings, layer_types=config.layer_types[:n_layers])
            with torch.device("meta"):
                return made(config)
        except Exception as problem:  # of the configuration, whatever it may be
            error = problem
    raise AssertionError(f"no model: {error}")


def test_every_family_with_a_plan_is_cut_or_named():
    import transformers

    transformers.logging.set_verbosity_error()
    kinds = configurations()
    assert len(kinds) > 100
    refused = {}
    for name, kind in kinds.items():
        try:
            model = model_of(kind)
            layered = zbpp.cut(model, weights=0)
        except (AssertionError, LookupError, StopIteration, ValueError) as error:
            refused[name] = str(error)
            continue
        names = {n for n, _ in model.named_parameters()}
        ends = [
            layered.own_name(place, held) for tie in layered.ties for place, held in tie
        ]
        assert set(ends) <= names | {
            n for n, _ in model.named_parameters(remove_duplicate=False)
        }
        assert layered.n_layers >= 3, "one has two layers in a block"
    assert refused.keys() <= UNMADE | UNFIT.keys(), refused
    assert len(kinds) - len(refused) >= 107
