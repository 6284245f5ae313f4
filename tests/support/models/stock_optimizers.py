"""Optimizers of random histories: torch's, an unknown one, and several together."""

from typing import Any

import torch
from torch import nn

from zbpp.runtime.optim.optimizers import MakeOptimizer

__all__ = ["OPTIMIZERS", "Counting"]


class Counting(torch.optim.SGD):
    """Unknown to zbpp: counts its steps in a group and uses the count."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["sum"] = state.get("sum", 0.0) + p.grad
                    p.sub_(state["sum"], alpha=group["lr"] / group["count"])


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Weights decay, the rest does not."""
    matrices = [p for p in parameters if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _several(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """One for the matrices, one that zbpp does not know, one for the rest."""
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() < 2]
    return [
        torch.optim.SGD(matrices, lr=1e-2, momentum=0.9),
        Counting(vectors[:1], lr=1e-2),
        torch.optim.AdamW(vectors[1:], lr=1e-2, fused=True),
    ]


def _matrices_only(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if p.dim() > 1], lr=1e-2)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda p: torch.optim.AdamW(_groups(p), lr=1e-2),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(_groups(p), lr=1e-2, momentum=0.9, nesterov=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "counting": lambda p: Counting(p, lr=1e-2),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
}
OF_ALL_PARAMETERS = tuple(OPTIMIZERS)
OPTIMIZERS |= {"several": _several, "matrices only": _matrices_only}
