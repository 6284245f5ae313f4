"""Causal language models of transformers from files alone, and a batch of tokens.

    config.json    random weights
    a folder       a checkpoint: config.json next to safetensors files

Weights are made or read layer by layer, where they are needed. They are fp32, whatever
the dtype of the files; autocast lowers the precision.
"""

from pathlib import Path
from typing import Any

import torch

from zbpp.core import RequestError
from zbpp.models.entry import cut
from zbpp.models.layered import Layered


def layers_of_config(
    path: str | Path,
    *,
    seq: int | None = None,
    samples: int = 2,
    seed: int = 0,
) -> tuple[Layered, dict[str, Any]]:
    """Make the layers of a model, and a batch of tokens.

    A folder has its weights; those of a file are random.

    Args:
        path: a config.json of transformers, or its folder.
        seq: tokens of a sample; None: 128, or as many as the model takes.
        samples: of the batch.
        seed: of random weights, which are made layer by layer where they are needed.

    Raises:
        RequestError: there is no such file, transformers is missing or knows no causal
            language model of this type, the sequence is too long for it, or there are
            no weights to read.
    """
    path = Path(path)
    config = read_config(path, seq=seq)
    if seq is None:
        seq = min(128, getattr(config, "max_position_embeddings", None) or 128)
    tokens = torch.arange(samples * seq).view(samples, seq) % config.vocab_size
    batch = {"input_ids": tokens, "labels": tokens}
    with torch.device("meta"):
        model = _model(config)
    if path.is_file():
        return cut(model, weights=seed), batch
    try:
        return cut(model, weights=path), batch
    except RequestError as error:
        raise RequestError(
            f"{error}; for random weights give {path / 'config.json'}"
        ) from None


def read_config(path: str | Path, *, seq: int | None = None) -> Any:
    """Read the configuration of a model.

    Args:
        path: a config.json of transformers, or its folder.
        seq: tokens of a sample, which must not be too many for it.

    Raises:
        RequestError: there is no such file, transformers is missing or knows no model
            of this type, or the sequence is too long for it.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise RequestError("hf: needs transformers: install zbpp[hf]") from error
    if not Path(path).exists():
        raise RequestError(f"{path}: there is no such file")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: {str(error).splitlines()[0]}") from None
    most = getattr(config, "max_position_embeddings", None)
    if seq is not None and most is not None and seq > most:
        raise RequestError(
            f"sequences of {seq} tokens are longer than {path} allows: "
            f"max_position_embeddings is {most}; give a smaller --seq"
        )
    return config


def _model(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    try:
        return auto.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise RequestError(
            f"{config.model_type} is no causal language model of transformers: "
            f"{str(error).splitlines()[0]}"
        ) from None
