"""The models of `memory/estimates.py`: layers, one micro-batch, loss, and settings."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))

from parts.split_models import Block

from zbpp.training.llama import LlamaConfig, build_layers, cross_entropy

__all__ = ["CONFIGURATIONS", "Configuration"]

Parts = tuple[list[nn.Module], tuple[Any, Any], Callable[..., Tensor]]


@dataclass(frozen=True)
class Configuration:
    """A model to be measured; ``megatron`` are sequence, samples, width, heads."""

    build: Callable[[], Parts]
    autocast: torch.dtype | None = None
    megatron: tuple[int, int, int, int] | None = None


class Again(nn.Module):
    """Recomputes its module in the backward, by either kind of checkpoint."""

    def __init__(self, inner: nn.Module, *, reentrant: bool = False) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Call the module."""
        y: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return y


class Embed(nn.Module):
    """Token and position embeddings, and dropout."""

    def __init__(self, vocabulary: int, width: int, seq: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(seq, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, sequence) to (batch, sequence, width)."""
        x: Tensor = self.dropout(self.tokens(tokens) + self.positions)
        return x


class Head(nn.Module):
    """Norm and projection; the weight may be an embedding's."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to logits."""
        y: Tensor = self.linear(self.norm(x))
        return y


class CapacityExperts(nn.Module):
    """Experts that take a fixed number of tokens each, so that shapes are known."""

    def __init__(self, width: int, n: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, n)
        self.up = nn.Parameter(torch.randn(n, width, 2 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(n, 2 * width, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        rows = x.flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        weights, chosen = scores.t().topk(rows.shape[0] // self.up.shape[0], dim=-1)
        taken = rows[chosen]
        out = functional.gelu(taken @ self.up) @ self.down * weights.unsqueeze(-1)
        return x + torch.zeros_like(rows).index_add(
            0, chosen.flatten(), out.flatten(0, 1).to(rows.dtype)
        ).view_as(x)


class Residual(nn.Module):
    """A convolution block with norms, which work in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) to the same."""
        return functional.relu(x + self.body(x))


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over tokens."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def blocks(
    n: int, width: int, samples: int, seq: int, wrap: Any = None, **options: Any
) -> Parts:
    """Transformer blocks alone."""
    layers = [Block(width, **options) for _ in range(n)]
    x = torch.randn(samples, seq, width)
    return [wrap(b) if wrap else b for b in layers], (x, x), functional.mse_loss


def language(
    n: int, width: int, samples: int, seq: int, vocabulary: int, *, tied: bool = False
) -> Parts:
    """Embedding, blocks, head and loss."""
    ends = Embed(vocabulary, width, seq), Head(width, vocabulary)
    if tied:
        ends[1].linear.weight = ends[0].tokens.weight
    tokens = torch.randint(0, vocabulary, (samples, seq))
    layers = [ends[0], *(Block(width) for _ in range(n)), ends[1]]
    return layers, (tokens, tokens), token_loss


def llama(n: int, dim: int, samples: int, seq: int) -> Parts:
    """The model of `zbpp train`."""
    config = LlamaConfig(dim=dim, n_blocks=n, n_heads=4, hidden=3 * dim, seq=seq)
    tokens = torch.randint(0, 256, (samples, seq))
    layers = build_layers(config, range(config.n_layers))
    return layers, (tokens, tokens), cross_entropy


class HuggingFaceLayer(nn.Module):
    """A decoder layer of transformers, with its own rotary embedding."""

    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        places = torch.arange(x.shape[1], device=x.device)[None]
        embedded = self.rotary(x, places)
        out = self.layer(x, position_embeddings=embedded, position_ids=places)
        y: Tensor = out[0] if isinstance(out, tuple) else out
        return y


def hugging_face(n: int, width: int, samples: int, seq: int) -> Parts:
    """Blocks of transformers' Llama, or without transformers of our own."""
    try:
        from transformers import LlamaConfig as Config
        from transformers.models.llama import modeling_llama
    except ImportError:
        return llama(n, width, samples, seq)
    config = Config(
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=n,
        vocab_size=1024,
        max_position_embeddings=seq,
        attn_implementation="sdpa",
    )
    layers: list[nn.Module] = [nn.Embedding(1024, width)]
    for i in range(n):
        layers.append(
            HuggingFaceLayer(
                modeling_llama.LlamaDecoderLayer(config, i),
                modeling_llama.LlamaRotaryEmbedding(config),
            )
        )
    layers.append(Head(width, 1024))
    tokens = torch.randint(0, 1024, (samples, seq))
    return layers, (tokens, tokens), token_loss


def mlp(n: int, width: int, rows: int) -> Parts:
    """Linears and activations, as single layers."""
    layers: list[nn.Module] = []
    for _ in range(n):
        layers += [nn.Linear(width, width), nn.GELU()]
    x = torch.randn(rows, width)
    return layers, (x, x), functional.mse_loss


def conv(n: int, channels: int) -> Parts:
    """Residual convolution blocks and a classifier."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, channels, 3, padding=1),
        *(Residual(channels) for _ in range(n)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)),
    ]
    batch = torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))
    return layers, batch, functional.cross_entropy


def experts(n: int, width: int) -> Parts:
    """Blocks and experts in turn."""
    layers = [part for _ in range(n) for part in (Block(width), CapacityExperts(width))]
    x = torch.randn(2, 256, width)
    return layers, (x, x), functional.mse_loss


def recurrent(n: int, width: int) -> Parts:
    """Layers that hand on tuples."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            a, b = value
            return self.left(a).tanh() + b, self.right(b).sigmoid() * a

    x = torch.randn(512, width)
    layers = [Pair() for _ in range(n)]

    def loss(pair: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return functional.mse_loss(pair[0] + pair[1], target)

    return layers, ((x, x), x), loss


BF16 = torch.bfloat16


def _reentrant(n: int, width: int, samples: int, seq: int) -> Parts:
    """A reentrant checkpoint needs an input that requires a gradient."""
    layers, batch, loss = blocks(n, width, samples, seq)
    again = [Again(block, reentrant=True) for block in layers]
    return [nn.Linear(width, width), *again], batch, loss


CONFIGURATIONS = {
    "blocks": Configuration(lambda: blocks(4, 512, 2, 256), None, (256, 2, 512, 8)),
    "blocks, bf16": Configuration(
        lambda: blocks(4, 512, 2, 256), BF16, (256, 2, 512, 8)
    ),
    "blocks, micro-batch 5": Configuration(
        lambda: blocks(4, 512, 5, 256), None, (256, 5, 512, 8)
    ),
    "blocks, sequence 1024": Configuration(
        lambda: blocks(4, 256, 1, 1024), None, (1024, 1, 256, 8)
    ),
    "blocks, softmax": Configuration(
        lambda: blocks(4, 512, 1, 512, is_fused=False), None, (512, 1, 512, 8)
    ),
    "blocks, softmax, dropout": Configuration(
        lambda: blocks(4, 512, 1, 512, is_fused=False, dropout=0.1),
        None,
        (512, 1, 512, 8),
    ),
    "blocks, softmax, bf16": Configuration(
        lambda: blocks(4, 512, 1, 512, is_fused=False), BF16, (512, 1, 512, 8)
    ),
    "checkpoint": Configuration(lambda: blocks(4, 512, 2, 256, Again)),
    "checkpoint, bf16": Configuration(lambda: blocks(4, 512, 2, 256, Again), BF16),
    "checkpoint, reentrant": Configuration(lambda: _reentrant(4, 512, 2, 256)),
    "head and loss": Configuration(lambda: language(4, 256, 2, 256, 8192)),
    "head and loss, bf16": Configuration(lambda: language(4, 256, 2, 256, 8192), BF16),
    "tied ends": Configuration(lambda: language(3, 256, 2, 256, 4096, tied=True)),
    "zbpp train": Configuration(lambda: llama(6, 256, 4, 256)),
    "zbpp train, bf16": Configuration(lambda: llama(6, 256, 4, 256), BF16),
    "Hugging Face": Configuration(lambda: hugging_face(4, 512, 2, 256)),
    "Hugging Face, bf16": Configuration(lambda: hugging_face(4, 512, 2, 256), BF16),
    "experts": Configuration(lambda: experts(2, 256)),
    "convolutions": Configuration(lambda: conv(4, 32)),
    "Linears": Configuration(lambda: mlp(6, 512, 1024)),
    "tuples": Configuration(lambda: recurrent(6, 512)),
}
"""By name."""
