"""Small models of transformers, with batches; transformers is loaded when asked for."""

from typing import Any

import torch

__all__ = ["ENCODER_DECODERS", "EXPORTED", "FAMILIES", "batch_of", "tiny", "untied"]

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_KINDS = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 8}),
    "mistral": (
        "MistralForCausalLM",
        "MistralConfig",
        {**_GROUPED, "sliding_window": 4},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_GROUPED, "num_local_experts": 4},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**_COMMON, **_NO_DROPOUT}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _COMMON),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_GROUPED, "head_dim": 8, "sliding_window": 4},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_GROUPED, "head_dim": 8, "sliding_window": 4, "layer_types": _KINDS},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", _COMMON),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {
            **_COMMON,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            **{k: _COMMON[k] for k in ("hidden_size", "intermediate_size")},
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
            "num_labels": 5,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **{"vocab_size": 96, "d_model": 32, "max_position_embeddings": 64},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
            **{"encoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48},
            **{"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **{"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48},
            **{"num_layers": 1, "num_heads": 4, "dropout_rate": 0.0},
            **{"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
            **{"use_cache": False},  # in a forward with one, sums round otherwise
        },
    ),
}
"""Class of the model and of its configuration, and what makes it small."""

ENCODER_DECODERS = {"bart": "decoder_layers", "t5": "num_decoder_layers"}
"""Families whose decoder is cut, and the setting that counts its blocks."""


EXPORTED = {*ENCODER_DECODERS, "vit"}
"""Families whose models are cut by export, with an example."""


def tiny(family: str, n_blocks: int = 4, *, seed: int = 0, **more: Any) -> Any:
    """A model of a family, in training mode."""
    import transformers

    transformers.logging.set_verbosity_error()
    model_name, config_name, settings = FAMILIES[family]
    blocks = ENCODER_DECODERS.get(family, "num_hidden_layers")
    settings = {**settings, **more, blocks: n_blocks}
    if "layer_types" in settings:
        settings["layer_types"] = (settings["layer_types"] * n_blocks)[:n_blocks]
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**settings)
    return getattr(transformers, model_name)(config).train()


def untied(family: str, n_blocks: int = 4, **more: Any) -> Any:
    """The same without tied weights."""
    return tiny(family, n_blocks, tie_word_embeddings=False, **more)


def batch_of(family: str, n: int = 4, *, seed: int = 1, length: int = 10) -> Any:
    """A batch of n samples, padded to lengths that differ, with labels."""
    torch.manual_seed(seed)
    if family == "vit":
        return {
            "pixel_values": torch.randn(n, 3, 16, 16),
            "labels": torch.randint(0, 5, (n,)),
        }
    ids = torch.randint(3, 96, (n, length))
    mask = torch.ones(n, length, dtype=torch.long)
    for sample in range(n):
        mask[sample, length - sample % 4 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
