"""Names of before 1.0, and of others' trainers, with those to use.

Keywords and methods that have moved are accepted for one release, each with one
`FutureWarning` that names the new place.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from inspect import signature
from operator import attrgetter
from typing import Any, ParamSpec

from zbpp.core import RequestError
from zbpp.models.given import layered_of
from zbpp.runtime.policies import DataParallel, Execution, Numerics, StepPolicy

__all__ = ["accepts_old_keywords", "missing_attribute"]

_PLACES = {
    "weigh": "numerics=zbpp.Numerics(weigh=...)",
    "autocast": "numerics=zbpp.Numerics(autocast=...)",
    "seed": "numerics=zbpp.Numerics(seed=...)",
    "first_step": "numerics=zbpp.Numerics(first_step=...)",
    "exact_sums": "numerics=zbpp.Numerics(exact_sums=...)",
    "post_validation": "step=zbpp.StepPolicy(post_validation=...)",
    "max_consecutive_skips": "step=zbpp.StepPolicy(max_consecutive_skips=...)",
    "loss_scale": "step=zbpp.StepPolicy(loss_scale=...)",
    "compile": "execution=zbpp.Execution(compile=...)",
    "watch": "execution=zbpp.Execution(watch=...)",
    "timeout_s": "execution=zbpp.Execution(timeout_s=...)",
    "first_timeout_s": "execution=zbpp.Execution(first_timeout_s=...)",
    "group": "mesh=...",
    "shard": "mesh=zbpp.DataParallel(mesh=..., shard=...)",
    "alternating_buffers": "mesh=zbpp.DataParallel(alternating_buffers=...)",
    "n_layers": "zbpp.layers_from(build, n_layers=...) as the model",
    "ties": "zbpp.layers_from(build, ties=...) as the model",
    "split": "zbpp.plan_model(model, schedule, split=...) as the schedule",
    "layers": "zbpp.plan_model(model, schedule, layer_costs=...) as the schedule",
    "example": "zbpp.plan_model(model, schedule, example=...) as the schedule",
    "recompute": "zbpp.plan_model(model, schedule, recompute=...) as the schedule",
    "costs": "zbpp.plan_model(model, schedule, costs=...) as the schedule",
    "memory": "zbpp.plan_model(model, schedule, memory_limit=...) as the schedule",
}
"""Keywords that `zbpp.Pipeline` had, and where each belongs now."""

_GONE = {
    "rollback": "the class of the optimizer decides how its steps are rolled back",
}
"""Keywords that `zbpp.Pipeline` had, and why they have no effect any more."""

_POLICIES: dict[str, Any] = {
    "numerics": Numerics,
    "step": StepPolicy,
    "execution": Execution,
}
_REPLICAS = ("shard", "alternating_buffers")
_FOR_MODEL = ("n_layers", "ties")
_FOR_PLAN = ("split", "layers", "example", "recompute", "costs", "memory")

_DIAGNOSTICS = (
    "timeline",
    "timelines",
    "split_report",
    "split_summary",
    "measured_costs",
    "prediction",
)
"""Methods that are functions of `zbpp.diagnostics` now."""

_RENAMED = {"chosen": "plan", "memory": "plan.costs"}

_INSTEAD = {
    "parameters": "named_parameters() gives the names and parameters of this process",
    "modules": "named_layers() gives the layers of this process",
    "optimizer": "optimizers lists those of this process's stages",
    "train": "step() trains, and sets no mode: that of each layer stays as it is",
    "eval": "evaluate() and predict() run in eval mode and restore it",
    "to": "give device= where the pipeline is made",
    "cuda": "give device= where the pipeline is made",
    "zero_grad": "step() clears the gradients",
    "backward": "step() runs forward, backward and optimizer",
    "forward": "step() trains, evaluate() gives a loss, predict() the outputs",
    "train_batch": "step(inputs, targets) trains on a batch",
    "eval_batch": "evaluate(inputs, targets) gives the loss of a batch",
    "save_checkpoint": "save(folder) writes a checkpoint",
    "load_checkpoint": "load(folder) goes on from one",
}
"""Names of modules and trainers, and what a pipeline has for them."""


def missing_attribute(pipeline: Any, name: str) -> Any:
    """Return what has moved, or say what stands for a name.

    Raises:
        AttributeError: a pipeline has nothing of this name.
    """
    if name in _DIAGNOSTICS:
        text = f"pipeline.{name}() has moved; call zbpp.diagnostics.{name}(pipeline)"
        warnings.warn(text, FutureWarning, stacklevel=3)
        function = getattr(import_module("zbpp.diagnostics"), name)
        return function.__get__(pipeline)
    if name in _RENAMED:
        text = f"pipeline.{name} has moved; give pipeline.{_RENAMED[name]}"
        warnings.warn(text, FutureWarning, stacklevel=3)
        return attrgetter(_RENAMED[name])(pipeline)
    hint = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise AttributeError(f"a Pipeline has no attribute {name!r}{hint}")


_Given = ParamSpec("_Given")


def accepts_old_keywords(init: Callable[_Given, None]) -> Callable[_Given, None]:
    """Let ``Pipeline.__init__`` take the keywords that it had before 1.0."""
    parameters = signature(init).parameters

    @wraps(init)
    def accepting(*args: Any, **keywords: Any) -> None:
        old = {name: keywords.pop(name) for name in _PLACES if name in keywords}
        for name in keywords.keys() & _GONE:
            text = f"zbpp.Pipeline: {name}= has no effect; leave it out: {_GONE[name]}"
            warnings.warn(text, FutureWarning, stacklevel=2)
            del keywords[name]
        for name in keywords:
            if name not in parameters:
                raise TypeError(_unknown(name, [*parameters, *_PLACES]))
        for name in old:
            text = f"zbpp.Pipeline: {name}= has moved; give {_PLACES[name]}"
            warnings.warn(text, FutureWarning, stacklevel=2)
        if not old:
            init(*args, **keywords)
            return
        call = signature(init).bind_partial(*args, **keywords)
        _translate(call.arguments, old)
        init(*call.args, **call.kwargs)

    return accepting


def _translate(arguments: dict[str, Any], old: dict[str, Any]) -> None:
    """Put old keywords into the arguments of a call where they belong now.

    Raises:
        RequestError: the model does not fit what is said of it.
    """
    for policy, kind in _POLICIES.items():
        fields = {name: old[name] for name in kind.__dataclass_fields__ if name in old}
        if fields:
            arguments[policy] = replace(arguments.get(policy, kind()), **fields)
    if old.get("group") is not None:
        if arguments.get("mesh") is not None:
            raise RequestError("give mesh or group, not both: the mesh has the groups")
        arguments["mesh"] = old["group"]
    if any(name in old for name in _REPLICAS):
        fields = {name: old[name] for name in _REPLICAS if name in old}
        mesh = arguments.get("mesh")
        replicas = mesh if isinstance(mesh, DataParallel) else DataParallel(mesh=mesh)
        arguments["mesh"] = replace(replicas, **fields)
    n_layers, ties = (old.get(name) for name in _FOR_MODEL)
    if "model" in arguments and (n_layers is not None or ties is not None):
        layered = layered_of(arguments["model"], n_layers)
        arguments["model"] = replace(layered, ties=(*layered.ties, *(ties or ())))
    if any(old.get(name) is not None for name in _FOR_PLAN):
        _plan(arguments, old)


def _plan(arguments: dict[str, Any], old: dict[str, Any]) -> None:
    """Plan as the constructor did, and give it the plan."""
    renamed = {"layers": "layer_costs", "memory": "memory_limit"}
    facts = {renamed.get(name, name): old.get(name) for name in _FOR_PLAN}
    made_as = {
        name: value
        for name, value in arguments.items()
        if name not in ("self", "model", "schedule", "clip_grad_norm")
    }
    schedule = arguments.get("schedule", "ZBH1")
    plan_model = import_module("zbpp.pipeline.plan_model").plan_model
    arguments["schedule"] = plan_model(arguments["model"], schedule, **facts, **made_as)


def _unknown(name: str, names: list[str]) -> str:
    nearest = get_close_matches(name, names, n=1)
    hint = f"; did you mean {nearest[0]}=?" if nearest else ""
    return f"zbpp.Pipeline takes no keyword {name!r}{hint}"
