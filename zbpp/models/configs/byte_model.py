"""Models whose tokens are bytes: what a training on text needs to know of them, and
those of transformers, from a configuration or from a checkpoint.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from zbpp.core import RequestError
from zbpp.models.configs.causal_lm import layers_of_files, read_config
from zbpp.models.hugging_face import cut_batch

__all__ = ["CausalLM", "TextModel", "read_causal_lm"]

_BYTES = 256
_OF_THE_FILE = ("transformers_version", "_name_or_path", "architectures", "dtype")
"""Entries of a configuration that do not change the model."""


class TextModel(Protocol):
    """A model whose tokens are bytes; its weights are not made before they are needed.

    The first layer is the embedding, the last one the head; between them are blocks.
    """

    @property
    def n_layers(self) -> int:
        """Layers, with embedding and head."""

    @property
    def n_blocks(self) -> int:
        """Layers between embedding and head, alike in work."""

    def given(self) -> dict[str, Any]:
        """Arguments of `zbpp.Pipeline` that say the model: layers, loss, dropout."""

    def batch(self, tokens: Tensor, following: Tensor) -> tuple[Any, Any]:
        """Inputs and targets of a step.

        Args:
            tokens: of shape (samples, seq).
            following: the token after each of them, of the same shape.
        """

    def about(self) -> dict[str, Any]:
        """The values that must be the same where a checkpoint of it is loaded."""


@dataclass(frozen=True)
class CausalLM:
    """A causal language model of transformers whose tokens are bytes.

    Args:
        path: a config.json, or the folder of a checkpoint.
        n_layers: with embedding and head.
        digest: of the configuration.
        seed: of random weights, and of dropout.
    """

    path: Path
    n_layers: int
    digest: str
    seed: int

    @property
    def n_blocks(self) -> int:
        """Layers between embedding and head."""
        return self.n_layers - 2

    def given(self) -> dict[str, Any]:
        """As `TextModel` has it; the loss is the model's own."""
        return {
            "model": layers_of_files(self.path, seed=self.seed),
            "seed": self.seed,
        }

    def batch(self, tokens: Tensor, following: Tensor) -> tuple[Any, Any]:
        """As `TextModel` has it: the model shifts the labels by itself."""
        return cut_batch({"input_ids": tokens, "labels": tokens})

    def about(self) -> dict[str, Any]:
        """As `TextModel` has it."""
        return {"config": self.digest}


def read_causal_lm(path: str | Path, *, seq: int, seed: int) -> CausalLM:
    """Read the configuration of a model that is trained on bytes, and no weights.

    Args:
        path: a config.json, or the folder of a checkpoint.
        seq: bytes of a sample.
        seed: of random weights, and of dropout.

    Raises:
        RequestError: the files do not say a causal language model, or bytes are no
            tokens of it.
    """
    path = Path(path)
    config = read_config(path, seq=seq)
    if config.vocab_size < _BYTES:
        raise RequestError(
            f"{path}: its vocabulary has {config.vocab_size} tokens, and a "
            f"token of the text is a byte; it needs {_BYTES} or more"
        )
    if seq < 2:
        raise RequestError("--seq is 1; a window needs a byte to predict: 2 or more")
    settings = {k: v for k, v in config.to_diff_dict().items() if k not in _OF_THE_FILE}
    text = json.dumps(settings, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return CausalLM(path, _n_layers(path, digest), digest, seed)


@lru_cache(maxsize=8)
def _n_layers(path: Path, digest: str) -> int:
    return layers_of_files(path, seed=0).n_layers
