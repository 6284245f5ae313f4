"""A small Llama-style language model over bytes, as a list of layers.

    tokens -> Embedding -> Block x n_blocks -> Head -> logits

Layers are made one by one, each from a separate random stream, so a process can build
the layers it needs and no others, and still has the same weights as the whole
model. Attention is by Vaswani et al. (arXiv 1706.03762), rotary positions by Su et
al. (2104.09864), SwiGLU by Shazeer (2002.05202), RMSNorm by Zhang and Sennrich
(1910.07467), and their arrangement by Touvron et al. (2302.13971). All matrix
products with weights are `nn.Linear` without bias.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # bytes
_SIZES = {"tiny": (32, 4, 2, 64), "small": (96, 8, 4, 256), "medium": (512, 8, 8, 1408)}
"""Width, blocks, heads, inner width of the feed-forward layers."""
_ROTARY_BASE = 10_000.0
_LOGIT_STD = 0.02  # of the head's weights: the first loss is close to log(256)

_norm = partial(nn.RMSNorm, eps=1e-5)
_linear = partial(nn.Linear, bias=False)


class Config(NamedTuple):
    """Sizes: of a sample in tokens, of a model; and the seed of its weights."""

    seq: int
    seed: int
    dim: int
    n_blocks: int
    n_heads: int
    hidden: int


def small_llama(size: str, *, seq: int, samples: int, seed: int) -> tuple[Any, ...]:
    """Give the builder of a size, a micro-batch of random bytes, and the loss.

    Args:
        size: ``"tiny"``, ``"small"`` (0.94 million parameters) or ``"medium"``.
        seq: tokens of a sample.
        samples: of the micro-batch.
        seed: of weights and bytes.
    """
    config = Config(seq, seed, *_SIZES[size])
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (samples, seq + 1), generator=generator)
    builder = partial(build_layers, config), config.n_blocks + 2  # and two ends
    return builder, (tokens[:, :-1], tokens[:, 1:]), cross_entropy


def build_layers(config: Config, indices: Iterable[int]) -> list[nn.Module]:
    """Build the layers of these indices, alike whatever else is built."""
    return [_build_layer(config, index) for index in indices]


def _build_layer(config: Config, index: int) -> nn.Module:
    """Build layer 0, the embedding, the last one, the head, or a block.

    Weights are normal and keep the variance of what passes through. What a block adds
    to the residual stream is scaled down by the number of such additions (Radford et
    al., GPT-2, 2019), so depth does not change the variance.
    """
    is_head = index == config.n_blocks + 1
    with torch.random.fork_rng(devices=[]):  # torch's values are not kept
        layer: nn.Module
        if index == 0:
            layer = nn.Embedding(VOCABULARY, config.dim)
        elif is_head:
            parts = {
                "norm": _norm(config.dim),
                "linear": _linear(config.dim, VOCABULARY),
            }
            layer = nn.Sequential(OrderedDict(parts))
        else:
            layer = Block(config)
    (seed,) = np.random.SeedSequence([config.seed, index]).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(seed))
    additions = 2 * config.n_blocks
    for name, weight in layer.named_parameters():
        if weight.dim() < 2:
            continue  # norms start at 1
        std = _LOGIT_STD if is_head else 1.0 if index == 0 else weight.shape[1] ** -0.5
        if name in ("attention.out.weight", "down.weight"):
            std /= math.sqrt(additions)
        nn.init.normal_(weight, std=std, generator=generator)
    return layer


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens of a micro-batch, in nats: (), from (..., 256) and (...)."""
    return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))`` by SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = _norm(config.dim)
        self.attention = Attention(config)
        self.feed_forward_norm = _norm(config.dim)
        self.gate = _linear(config.dim, config.hidden)
        self.up = _linear(config.dim, config.hidden)
        self.down = _linear(config.hidden, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) to the same."""
        x = x + self.attention(self.attention_norm(x))
        inner = self.feed_forward_norm(x)
        out: Tensor = x + self.down(functional.silu(self.gate(inner)) * self.up(inner))
        return out


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    cosine: Tensor  # (seq, dim / n_heads / 2), as is the sine
    sine: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        self.query = _linear(config.dim, config.dim)
        self.key = _linear(config.dim, config.dim)
        self.value = _linear(config.dim, config.dim)
        self.out = _linear(config.dim, config.dim)
        half = self.head_dim // 2
        rates = _ROTARY_BASE ** -(torch.arange(half) / half)
        angles = torch.outer(torch.arange(config.seq), rates)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, seq, dim) to the same; no position sees a later one."""
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.query(x), self.key(x), self.value(x))
        )
        mixed = functional.scaled_dot_product_attention(
            self._rotate(query), self._rotate(key), value, is_causal=True
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _rotate(self, x: Tensor) -> Tensor:
        """Turn each pair of numbers by its position times the pair's rate."""
        cosine, sine = self.cosine[: x.shape[-2]], self.sine[: x.shape[-2]]
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        return torch.cat(turned, dim=-1).type_as(x)
