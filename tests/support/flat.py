"""A pipeline from flat settings: a test names an option, not the policy that has it."""

from dataclasses import replace
from typing import Any

import zbpp
from zbpp.models import layered_of

POLICIES = {
    "numerics": zbpp.Numerics,
    "step": zbpp.StepPolicy,
    "execution": zbpp.Execution,
}
PLANNED = ("split", "layer_costs", "example", "recompute", "costs", "memory_limit")


def unknown(make: Any) -> Any:
    """Let optimizers be of classes that zbpp does not know, and copies whole."""

    def build(parameters: list[Any]) -> Any:
        built = make(parameters)
        for optimizer in built if isinstance(built, list) else [built]:
            kind = type(optimizer)
            optimizer.__class__ = type(kind.__name__, (kind,), {})
        return built

    return build


def flat_pipeline(model: Any, **settings: Any) -> zbpp.Pipeline:
    """Put each setting where it belongs, and make the pipeline.

    Args:
        model: as `zbpp.Pipeline` takes it.
        settings: options; ``snapshots``: of optimizers that zbpp does not know.
    """

    def taken(names: Any) -> dict[str, Any]:
        return {name: settings.pop(name) for name in names if name in settings}

    if settings.pop("snapshots", False):
        settings["optimizer"] = unknown(settings["optimizer"])
    for name, kind in POLICIES.items():
        settings[name] = kind(**taken(kind.__dataclass_fields__))
    if replicas := taken(("shard", "alternating_buffers")):
        settings["mesh"] = zbpp.DataParallel(mesh=settings.get("mesh"), **replicas)
    facts = taken(("n_layers", "ties"))
    if any(fact is not None for fact in facts.values()):
        layered = layered_of(model, facts.get("n_layers"))
        model = replace(layered, ties=(*layered.ties, *(facts.get("ties") or ())))
    planned = taken(PLANNED)
    if any(fact is not None for fact in planned.values()):
        made_as = {k: v for k, v in settings.items() if k != "clip_grad_norm"}
        settings["schedule"] = zbpp.plan_model(
            model, made_as.pop("schedule", "ZBH1"), **planned, **made_as
        )
    return zbpp.Pipeline(model, **settings)
