"""Modules of every kind that a split backward must get right.

Each takes one value, a tensor or a tuple of tensors, as layers of a pipeline do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


def features(i: int) -> tuple[Tensor, ...]:
    """(3, 4, 6), another for each micro-batch."""
    return (normal(i, 3, 4, 6),)


def tokens(i: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, 7, (3, 4), generator=torch.Generator().manual_seed(i)),)


def two(i: int) -> tuple[Tensor, ...]:
    return normal(i, 3, 4, 6), normal(i + 50, 3, 4, 6)


def image(i: int) -> tuple[Tensor, ...]:
    return (normal(i, 2, 4, 6, 6),)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """A module, its inputs, and the parameters whose gradients must wait for W."""

    build: Callable[[], nn.Module]
    waits: str
    inputs: Callable[[int], tuple[Tensor, ...]] = features
    autocast: bool = False


class Fn(nn.Module):
    """A function of (module, value), with parameters of the given shapes."""

    def __init__(self, function: Callable[[Any, Any], Any], **shapes: Any) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            if isinstance(shape, nn.Module):
                setattr(self, name, shape)
            else:
                setattr(self, name, nn.Parameter(torch.randn(shape) / 2))

    def forward(self, value: Any) -> Any:
        return self.function(self, value)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, reentrant: bool = False) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, value: Any) -> Any:
        return checkpoint(self.inner, value, use_reentrant=self.reentrant)


class Square(torch.autograd.Function):
    """Counts how often its backward runs."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        Square.calls += 1
        (x,) = ctx.saved_tensors
        return 2 * x * dy


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 6))


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        if not names or name in names:
            parameter.requires_grad_(False)
    return module


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    module[2].weight = module[0].weight
    return module


def hooked(*, post: bool) -> nn.Module:
    module = mlp()
    if post:
        module[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
    else:
        module[0].weight.register_hook(lambda g: g * 2)
    return module


def hooked_weight(module: nn.Module, name: str) -> nn.Module:
    """Double its gradient in one hook, and add one in another."""
    p = module.get_parameter(name)
    p.register_hook(lambda g: g * 2)
    p.register_post_accumulate_grad_hook(lambda p: p.grad.add_(1))  # type: ignore[union-attr]
    return module


def attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.qkv(m.norm(x)).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
    y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + m.out(y.transpose(1, 2).flatten(2))


def block() -> nn.Module:
    return Fn(attention, qkv=nn.Linear(6, 12), out=nn.Linear(4, 6, bias=False),
              norm=nn.LayerNorm(6))  # fmt: skip


def routed(m: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    scores = m.router(rows).softmax(-1)
    best = scores.argmax(-1)
    out = torch.zeros_like(rows)
    for i, expert in enumerate(m.experts):
        chosen = (best == i).nonzero().flatten()
        if len(chosen):
            part = expert(rows[chosen]) * scores[chosen, i, None]
            out = out.index_add(0, chosen, part)
    return out.view_as(x)


def branching(m: Any, x: Tensor) -> Tensor:
    return m.a(x) if float(x.detach().sum()) > 0 else m.b(x).relu() + m.a(x)


def in_place(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    y.relu_()
    y = y + 1
    y[:, 0] = 0
    return m.b(y).add_(1)


def lora(m: Any, x: Tensor) -> Tensor:
    return f.linear(x, m.base.weight) + (x @ m.down) @ m.up


def offloaded(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return m.inner(x)


def partly_without(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.a(x)
    return m.b(y + x).detach() + m.a(x)


def selective(m: Any, x: Tensor) -> Tensor:
    """Recomputes all but the matrix products."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(kept)

    return checkpoint(m.inner, x, use_reentrant=False, context_fn=contexts)


def lin(n: int = 6, k: int = 6, **more: Any) -> nn.Linear:
    return nn.Linear(n, k, **more)


def conv(**more: Any) -> nn.Module:
    return nn.Conv2d(4, 4, 3, **more)


def twice(function: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda m, x: m.a(function(m.a(x)))
