"""Optimizers of `cases`, by name: torch's, some that zbpp does not know, several.

A builder takes parameters, or pairs of names and parameters, as that of a pipeline.
"""

from collections.abc import Callable, Iterator
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from torch import nn

__all__ = ["OPTIMIZERS", "unknown"]

Parameters = list[nn.Parameter]
Named = list[tuple[str, nn.Parameter]]

_sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True)
_adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def unknown(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let optimizers be of classes that zbpp does not know."""

    @wraps(make)
    def build(parameters: Any) -> Any:
        built = make(parameters)
        for optimizer in built if isinstance(built, list) else [built]:
            kind = type(optimizer)
            optimizer.__class__ = type(kind.__name__, (kind,), {})
        return built

    return build


class Counting(torch.optim.SGD):
    """Unknown to zbpp: counts its steps in a group, a number and a tensor.

    The group's count alone is saved. The others must agree with it: else the rate is
    another one.
    """

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.calls, self.total = 0, torch.zeros(())
        self.before: int | None = None  # steps of the run that this run resumes

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        self.calls += 1
        self.total += 1
        for group in self.param_groups:
            group["count"] = count = group.get("count", 0) + 1
            self.before = count - 1 if self.before is None else self.before
            ahead = self.calls + float(self.total) - 2 * (count - self.before)
            rate = group["lr"] / (count + ahead)
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["sum"] = state.get("sum", 0.0) + p.grad
                    p.sub_(state["sum"], alpha=rate)


def _matrices(parameters: Parameters) -> Parameters:
    return [p for p in parameters if p.dim() > 1]


def _rest(parameters: Parameters) -> Parameters:
    return [p for p in parameters if p.dim() < 2]


def _groups(parameters: Parameters) -> torch.optim.Optimizer:
    """Matrices decay, the rest does not."""
    decays = {"params": _matrices(parameters), "weight_decay": 0.1}
    rest = {"params": _rest(parameters), "weight_decay": 0.0, "lr": 2e-2}
    return torch.optim.AdamW([decays, rest], lr=1e-2)


def _two(parameters: Parameters, kind: Any = _sgd) -> list[torch.optim.Optimizer]:
    """One for matrices, one for the rest."""
    pairs = (kind, _matrices(parameters)), (_adamw, _rest(parameters))
    return [make(part) for make, part in pairs if part]


def _three(named_parameters: Named) -> list[torch.optim.Optimizer]:
    """One for the matrices, one that zbpp does not know, one for the rest."""
    parameters = [p for _, p in named_parameters]
    biases = [p for name, p in named_parameters if name.endswith("bias")]
    others = [p for p in _rest(parameters) if all(p is not x for x in biases)]
    pairs = (
        (_sgd, _matrices(parameters)),
        (partial(Counting, lr=1e-2), biases),
        (partial(torch.optim.AdamW, lr=1e-2, fused=True), others),
    )
    return [make(part) for make, part in pairs if part]


def _hooked(parameters: Parameters) -> torch.optim.Optimizer:
    """A hook cannot be rolled back, so the step waits for the norm."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def _of_torch() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every optimizer of torch that steps dense gradients, in all its ways."""
    options: dict[str, dict[str, Any]] = {
        "Adam": {"amsgrad": True, "weight_decay": 0.1},
        "AdamW": {"maximize": True},
        "NAdam": {"decoupled_weight_decay": True},
        "RMSprop": {"momentum": 0.9, "centered": True},
        "SGD": {"momentum": 0.9, "nesterov": True},
    }
    for name, kind in vars(torch.optim).items():
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
            continue
        if name in ("Optimizer", "LBFGS", "SparseAdam", "Muon"):
            continue
        yield name, partial(kind, lr=1e-2, **options.get(name, {}))
        for way in {"foreach", "fused"} & signature(kind).parameters.keys():
            yield f"{name} {way}", partial(kind, lr=1e-2, **{way: True})


OPTIMIZERS: dict[str, Callable[..., Any]] = dict(sorted(_of_torch())) | {
    "adamw": _adamw,
    "groups": _groups,
    "sgd": _sgd,
    "plain sgd": partial(torch.optim.SGD, lr=0.1),
    "matrices": lambda parameters: torch.optim.SGD(_matrices(parameters), lr=0.02),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    "counting": partial(Counting, lr=1e-2),
    "several": _two,
    "several, one unknown": _three,
    "hooked": _hooked,
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = partial(_two, kind=partial(torch.optim.Muon, lr=1e-2))
