"""Plans for costs of layers, in the words that most tests need."""

from typing import Any

from zbpp.core import LayerCosts, Schedule
from zbpp.planning import Plan, PlanRequest, make_plan

__all__ = ["plan_layers"]


def plan_layers(mode: str | Schedule, layers: LayerCosts, **asked: Any) -> Plan:
    """Answer a request with costs of layers."""
    return make_plan(PlanRequest(schedule=mode, costs=layers, **asked))
