"""A Llama of 70 billion parameters by its sizes, for `zbpp estimate`; no weights.

zbpp estimate --model llama:build --stages 8 --microbatches 32
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["build"]

WIDTH, HIDDEN, HEADS, KEYS, VOCABULARY, N_BLOCKS, SEQ = (
    8192,
    28672,
    64,
    8,
    128256,
    80,
    4096,
)


class Block(nn.Module):
    """Attention with grouped keys, and SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, KEYS * size, bias=False)
        self.value = nn.Linear(WIDTH, KEYS * size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        y = self.norms[0](x)
        parts = (self.query(y), self.key(y), self.value(y))
        q, k, v = (p.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in parts)
        k, v = (t.repeat_interleave(HEADS // KEYS, dim=1) for t in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        out: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build() -> tuple[Any, Any, Any]:
    """Layers in bf16, a micro-batch of one sequence, and the loss."""
    layers = [
        nn.Embedding(VOCABULARY, WIDTH),
        *(Block() for _ in range(N_BLOCKS)),
        nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)),
    ]
    tokens = torch.zeros(1, SEQ, dtype=torch.int64)
    return [layer.bfloat16() for layer in layers], (tokens, tokens), loss
