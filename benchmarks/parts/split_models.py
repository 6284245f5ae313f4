"""The models of `split_backward.py`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["MODELS", "SMALL", "blocks"]


class Block(nn.Module):
    """A transformer block; its attention is one kernel, or products and a softmax."""

    def __init__(
        self, width: int, heads: int = 8, *, is_fused: bool = True, dropout: float = 0
    ) -> None:
        super().__init__()
        self.is_fused, self.dropout = is_fused, dropout
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        if self.is_fused:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            shares = scores.masked_fill(later, float("-inf")).softmax(-1)
            y = functional.dropout(shares, self.dropout) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Checkpointed(nn.Module):
    """Recomputes its module in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Call the module."""
        return checkpoint(self.inner, x, use_reentrant=False)


class Experts(nn.Module):
    """Four feed-forward experts; each token goes to the best one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        rows = x.flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            chosen = (best == i).nonzero().flatten()
            part = expert(rows[chosen]) * scores[chosen, i, None]
            out = out.index_add(0, chosen, part.to(out.dtype))
        return x + out.view_as(x)


class JointExperts(nn.Module):
    """The same without a bias, all experts in one weight for each product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.up = nn.Parameter(torch.randn(4, 2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(4, width, 2 * width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        rows = x.flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(rows)
        for i in range(4):
            chosen = (best == i).nonzero().flatten()
            hidden = functional.gelu(functional.linear(rows[chosen], self.up[i]))
            part = functional.linear(hidden, self.down[i]) * scores[chosen, i, None]
            out = out.index_add(0, chosen, part)
        return x + out.view_as(x)


def narrow(n: int) -> nn.Module:
    """Linears whose time is mostly that of the host."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(n)))


def mlp(width: int) -> nn.Module:
    """Four Linears."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers)


def conv_net() -> nn.Module:
    """Four convolutions with norms."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers)


def blocks(n: int, width: int = 512, **options: Any) -> nn.Module:
    """Transformer blocks."""
    return nn.Sequential(*(Block(width, **options) for _ in range(n)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP x4": (lambda: mlp(1024), (512, 1024)),
    "block x4, micro-batch 1": (lambda: blocks(4), (1, 256, 512)),
    "block x4, micro-batch 2": (lambda: blocks(4), (2, 256, 512)),
    "block x4, softmax": (
        lambda: blocks(4, is_fused=False),
        (1, 256, 512),
    ),
    "block x4, softmax, dropout": (
        lambda: blocks(4, is_fused=False, dropout=0.1),
        (1, 256, 512),
    ),
    "block x2, sequence 1024": (lambda: blocks(2, 256), (1, 1024, 256)),
    "block x4, checkpointed": (
        lambda: nn.Sequential(*(Checkpointed(Block(512)) for _ in range(4))),
        (2, 256, 512),
    ),
    "conv net": (conv_net, (8, 32, 64, 64)),
    "experts": (lambda: Experts(512), (4, 512, 512)),
    "width 64, Linear x8": (lambda: narrow(8), (16, 64)),
    "experts in one weight": (lambda: JointExperts(512), (4, 512, 512)),
}

SMALL = {"width 64, Linear x8"}
"""Models whose backward takes less than a millisecond."""
