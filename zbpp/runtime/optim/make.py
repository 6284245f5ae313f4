"""From the caller's function to the optimizers of a stage.

A function whose first argument is called ``named_parameters`` gets pairs of a name and
a parameter, by the model's names; any other gets the parameters.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.core import RequestError, a_kind
from zbpp.runtime.optim.rollback import parameters_of

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
MakeOptimizer = Callable[[list[Any]], Optimizers]
"""Called with a stage's parameters, also frozen ones; returns optimizers."""

NAMED = "named_parameters"

_LINE = "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"


def check_optimizer(optimizer: Any) -> None:
    """Refuse values that cannot make the optimizers of stages.

    An optimizer that is made already is refused: stages need several, and learning-rate
    schedulers of this optimizer would change none of them.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise RequestError(
            f"optimizer is {a_kind(optimizer)}, and each stage makes one; "
            f"give the function that makes it, {_LINE}, and make learning-rate "
            "schedulers of pipeline.optimizers"
        )
    if optimizer is None or (
        callable(optimizer) and not isinstance(optimizer, nn.Module)
    ):
        return
    what = repr(optimizer) if isinstance(optimizer, str) else a_kind(optimizer)
    raise RequestError(
        f"optimizer is {what}; give a function of a stage's parameters, {_LINE}, or "
        "None to step yourself"
    )


def made_optimizers(
    make: MakeOptimizer, named: Sequence[tuple[str, nn.Parameter]]
) -> list[torch.optim.Optimizer]:
    """Call the function with one stage's parameters, and check its result."""
    result = _call(make, named)
    optimizers: list[Any] = (
        list(result) if isinstance(result, list | tuple) else [result]
    )
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise RequestError(
                f"the optimizer's builder gave {a_kind(optimizer)}; let it return an "
                "optimizer, a list of optimizers, or [] for a stage that steps nothing"
            )
        _refuse_clipping(optimizer)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise RequestError(
                f"{a_kind(optimizer)} needs a closure, to compute the loss several "
                "times in a step, which a pipeline computes once; choose an optimizer "
                "whose step() needs none"
            )
    parameters: set[Tensor] = {p for _, p in named}
    stepped = [p for optimizer in optimizers for p in parameters_of(optimizer)]
    foreign = [tuple(p.shape) for p in stepped if p not in parameters]
    if foreign:
        raise RequestError(
            f"the optimizer's builder added {len(foreign)} parameter(s) that no layer "
            f"of the stage has (of shape {foreign[0]}): every stage would step a copy "
            "of them; put them into a layer"
        )
    return optimizers


def _refuse_clipping(optimizer: Any) -> None:
    """Refuse an optimizer that clips by the norm of the parameters that it steps.

    A ``pre_norm`` that is False turns it off in `pytorch_optimizer.Lamb`.
    """
    norms = [group.get("max_grad_norm") for group in optimizer.param_groups]
    norm = next(filter(None, norms), None)
    if norm is not None and getattr(optimizer, "pre_norm", True):
        raise RequestError(
            f"optimizer makes {a_kind(optimizer)} with max_grad_norm={norm}, which "
            "clips by the norm of one stage's gradients, so the number of stages would "
            "change the training; turn it off there (max_grad_norm=0, or None in "
            f"timm), and write zbpp.Pipeline(..., clip_grad_norm={norm})"
        )


def _call(make: MakeOptimizer, named: Sequence[tuple[str, nn.Parameter]]) -> Any:
    try:
        return make(list(named) if _takes_names(make) else [p for _, p in named])
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        if not any(p.requires_grad for _, p in named):
            return []  # a filter by requires_grad leaves nothing where all is frozen
        raise RequestError(
            "the optimizer's builder made an optimizer of no parameters on a stage "
            f"that has {', '.join(name for name, _ in named[:3])}, ...; let it return "
            "[] where it chooses none"
        ) from error


def _takes_names(make: MakeOptimizer) -> bool:
    try:
        parameters = inspect.signature(make).parameters
    except ValueError:  # of a function that is written in C
        return False
    return next(iter(parameters), None) == NAMED
