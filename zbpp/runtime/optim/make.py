"""From the caller's function to the optimizers of a stage, or to a line that mends it.

A function whose first argument is called ``named_parameters`` gets pairs of a name and
a parameter, by the model's own names; any other gets the parameters.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.core import RequestError, a_kind
from zbpp.runtime.optim.rollback import parameters_of

__all__ = ["MakeOptimizer", "check_optimizer", "made_optimizers"]

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
MakeOptimizer = Callable[[list[Any]], Optimizers]
"""Called with one stage's parameters, also frozen ones; gives one optimizer or more."""

NAMED = "named_parameters"

_LINE = "optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"


def check_optimizer(optimizer: Any) -> None:
    """Refuse what cannot make the optimizers of stages.

    An optimizer that is made already is refused: stages need several, and learning-rate
    schedulers of the one would change none of them.

    Raises:
        RequestError: the line to write stands in the message.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise RequestError(
            f"optimizer is {a_kind(optimizer)}, and each stage makes one of its own; "
            f"give the function, {_line_for(optimizer)}, and make learning-rate "
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
    """Call the function with one stage's parameters.

    Args:
        make: as `zbpp.Pipeline` takes it.
        named: the parameters by the model's own names.

    Raises:
        RequestError: it gives something else, or what cannot step a pipeline.
    """
    made = _call(make, named)
    optimizers: list[Any] = list(made) if isinstance(made, list | tuple) else [made]
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise RequestError(
                f"the optimizer's builder gave {a_kind(optimizer)}; let it return an "
                "optimizer, a list of optimizers, or [] for a stage that steps nothing"
            )
        if _needs_closure(optimizer):
            raise RequestError(
                f"{a_kind(optimizer)} needs a closure, to compute the loss several "
                "times in a step, which a pipeline computes once; choose an optimizer "
                "whose step() needs none"
            )
    names: dict[Tensor, str] = {p: name for name, p in named}
    stepped = [p for optimizer in optimizers for p in parameters_of(optimizer)]
    foreign = [tuple(p.shape) for p in stepped if p not in names]
    if foreign:
        raise RequestError(
            f"the optimizer's builder added {len(foreign)} parameter(s) that no layer "
            f"of the stage has (of shape {foreign[0]}): every stage would step a copy "
            "of them; put them into a layer"
        )
    _refuse_expanded(names, stepped)
    return optimizers


def _call(make: MakeOptimizer, named: Sequence[tuple[str, nn.Parameter]]) -> Any:
    try:
        return make(list(named) if _takes_names(make) else [p for _, p in named])
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        if not any(p.requires_grad for _, p in named):
            return []  # a filter by requires_grad leaves nothing where all is frozen
        raise RequestError(
            f"an optimizer of no parameters: of this stage's ({_few(named)}) none "
            "is chosen for it; leave it out there, the function may return a list "
            "of those that have some, or []"
        ) from error


def _takes_names(make: MakeOptimizer) -> bool:
    try:
        parameters = inspect.signature(make).parameters
    except ValueError:  # of a function that is written in C
        return False
    return next(iter(parameters), None) == NAMED


def _needs_closure(optimizer: Any) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _refuse_expanded(names: dict[Tensor, str], stepped: Iterable[Tensor]) -> None:
    for p in stepped:
        shared = any(n > 1 and s == 0 for n, s in _extents(p))
        if shared and p.requires_grad:
            raise RequestError(
                f"{names.get(p, 'a parameter')} of shape {list(p.shape)} is expanded: "
                "its elements share memory, which no optimizer can step; make it "
                "whole, nn.Parameter(x.clone())"
            )


def _extents(p: Tensor) -> Iterable[tuple[int, int]]:
    if p.layout is not torch.strided:
        return ()
    return zip(p.shape, p.stride(), strict=True)


def _few(named: Sequence[tuple[str, nn.Parameter]]) -> str:
    names = [name for name, _ in named]
    return ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])


def _line_for(optimizer: torch.optim.Optimizer) -> str:
    """The function that makes such an optimizer, with what was set in it."""
    kind = type(optimizer)
    defaults = inspect.signature(kind).parameters
    changed = [
        f"{name}={value!r}"
        for name, value in optimizer.defaults.items()
        if name in defaults and repr(value) != repr(defaults[name].default)
    ]
    home = "torch.optim." if kind.__module__.startswith("torch.optim") else ""
    made = ", ".join([f"{home}{kind.__name__}(parameters", *changed])
    if len(optimizer.param_groups) > 1:
        return (
            f"optimizer=lambda named_parameters: {home}{kind.__name__}(...), which "
            "forms its groups by the names"
        )
    return f"optimizer=lambda parameters: {made})"
