"""Modules that use a weight in parts, as mixtures of experts do, for the zoo."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f
from zoo import Case, Checkpointed, Fn, frozen, hooked_weight

__all__ = ["PARTS", "selected"]

IDS = torch.tensor([2, 0, 2])


def selected(m: Any, x: Tensor) -> Tensor:
    """Experts in one weight each for up and down; each row goes to the best one."""
    rows = x.flatten(0, 1)
    scores = (rows @ m.router).softmax(-1)
    best = scores.argmax(-1)
    out = torch.zeros_like(rows)
    for i in best.unique():
        chosen = (best == i).nonzero().flatten()
        hidden = f.linear(rows[chosen], m.up[i]).relu()
        part = f.linear(hidden, m.down[i]) * scores[chosen, i, None]
        out = out.index_add(0, chosen, part.to(out.dtype))
    return out.view_as(x)


def experts() -> nn.Module:
    return Fn(selected, router=(6, 4), up=(4, 8, 6), down=(4, 6, 8))


def over(parts: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    """The sum of a value's products with parts of a weight."""
    return lambda: Fn(
        lambda m, x: sum((x @ w).relu().sum(-1) for w in parts(m.w)), w=(6, 9)
    )


def stacked(parts: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: Fn(lambda m, x: sum((x @ w).relu() for w in parts(m.w)), w=(3, 6, 5))


PARTS: dict[str, Case] = {
    "experts selected": Case(experts, "router up down"),
    "experts selected, checkpointed": Case(
        lambda: Checkpointed(experts()), "inner.router inner.up inner.down"),
    "experts selected, autocast": Case(experts, "router up down", autocast=True),
    "experts selected, hooks": Case(
        lambda: hooked_weight(experts(), "up"), "router down"),
    "experts selected, one frozen": Case(
        lambda: frozen(experts(), "up"), "router down"),
    "experts unbound": Case(stacked(lambda w: w.unbind()), "w"),
    "experts unbound, one not used": Case(stacked(lambda w: w.unbind()[1:]), "w"),
    "experts looked up": Case(lambda: Fn(
        lambda m, x: torch.bmm(x, m.w[IDS]), w=(3, 6, 5)), "w"),
    "experts looked up by index_select": Case(lambda: Fn(
        lambda m, x: torch.bmm(x, m.w.index_select(0, IDS)), w=(3, 6, 5)), "w"),
    "experts in batches, transposed": Case(lambda: Fn(
        lambda m, x: torch.bmm(x, m.w.transpose(1, 2)), w=(3, 5, 6)), "w"),
    "experts by einsum": Case(lambda: Fn(
        lambda m, x: torch.einsum("ecd,efd->ecf", x, m.w), w=(3, 5, 6)), "w"),
    "experts by einsum, all tokens": Case(lambda: Fn(
        lambda m, x: torch.einsum("bsd,edf->besf", x, m.w), w=(2, 6, 5)), "w"),
    "parts of other sizes": Case(over(lambda w: w.split([2, 3, 4], 1)), "w"),
    "parts by narrow": Case(
        over(lambda w: (w.narrow(1, 0, 4), w.narrow(1, 4, 2))), "w"),
    "parts of parts": Case(stacked(
        lambda w: (w[0][:, :2], w[0][:, 2:4], w[-1][:, -2:])), ""),
    "parts of a transposed weight": Case(
        lambda: Fn(lambda m, x: sum((x @ w).sum(-1) for w in m.w.t().split(2, 1)),
                   w=(5, 6)), ""),
    "parts that are linear": Case(lambda: Fn(
        lambda m, x: sum(f.linear(x, w, m.b) for w in m.w.chunk(2)),
        w=(10, 6), b=(5,)), "w"),
    # the order of additions would be another: in B
    "parts that overlap": Case(over(lambda w: (w[:, :5], w[:, 4:], w[:, 2:7])), ""),
    "parts that overlap from the end": Case(over(lambda w: (w[:, :5], w[:, -5:])), ""),
    "a part used thrice": Case(stacked(lambda w: (w[1], w[1], w[1])), ""),
    "one chunk used twice": Case(
        over(lambda w: [*(chunks := w.chunk(3, 1)), chunks[0]]), ""),
    "a part and the whole": Case(over(lambda w: (w, w[:, :3])), ""),
    "a part and its norm": Case(lambda: Fn(
        lambda m, x: x @ m.w[0] + m.w[1].sum(), w=(2, 6, 6)), ""),
}  # fmt: skip
