"""Zero-bubble pipeline parallelism for PyTorch: plan, simulate, run.

``import zbpp`` loads no torch: what needs it is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zbpp.core import Costs, RequestError, Schedule
from zbpp.core.reductions import Reduction, TopK, TwoLevel
from zbpp.planning import Plan, PlanRequest, make_plan, plan, read_plan
from zbpp.runtime.policies import DataParallel, Execution, Numerics, StepPolicy

if TYPE_CHECKING:
    from zbpp import averaging, diagnostics, simulator
    from zbpp.models import cut, layers_from
    from zbpp.pipeline import Pipeline, plan_model
    from zbpp.pipeline.torch_schedule import TorchSchedule
    from zbpp.runtime.overlap import overlap_point
    from zbpp.runtime.parallel.experts import deal
    from zbpp.runtime.parallel.mesh import make_mesh as mesh

__all__ = [
    "Costs",
    "DataParallel",
    "Execution",
    "Numerics",
    "Pipeline",
    "Plan",
    "PlanRequest",
    "Reduction",
    "RequestError",
    "Schedule",
    "StepPolicy",
    "TopK",
    "TorchSchedule",
    "TwoLevel",
    "averaging",
    "cut",
    "deal",
    "diagnostics",
    "layers_from",
    "make_plan",
    "mesh",
    "overlap_point",
    "plan",
    "plan_model",
    "read_plan",
    "simulator",
]

_HOMES = {
    "Pipeline": ("zbpp.pipeline", "Pipeline"),
    "TorchSchedule": ("zbpp.pipeline.torch_schedule", "TorchSchedule"),
    "cut": ("zbpp.models", "cut"),
    "deal": ("zbpp.runtime.parallel.experts", "deal"),
    "layers_from": ("zbpp.models", "layers_from"),
    "mesh": ("zbpp.runtime.parallel.mesh", "make_mesh"),
    "overlap_point": ("zbpp.runtime.overlap", "overlap_point"),
    "plan_model": ("zbpp.pipeline", "plan_model"),
}
"""Module and name of what is loaded when it is first used."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home, inner = _HOMES[name]
        return getattr(import_module(home), inner)
    if name in ("averaging", "diagnostics", "simulator"):
        return import_module(f"zbpp.{name}")
    raise AttributeError(f"module 'zbpp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
