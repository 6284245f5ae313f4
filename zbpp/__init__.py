"""Zero-bubble pipeline parallelism for PyTorch: plan, simulate, run.

``import zbpp`` loads no torch: `Pipeline`, `cut` and `mesh`, which do, are loaded when
they are first used.
"""

from typing import TYPE_CHECKING, Any

from zbpp.core import Costs, MemoryModel, RequestError, Schedule
from zbpp.planning import Plan, PlanRequest, make_plan, plan, read_plan

if TYPE_CHECKING:
    from zbpp.models import cut
    from zbpp.pipeline import Pipeline
    from zbpp.runtime.parallel.mesh import make_mesh as mesh

__all__ = [
    "Costs",
    "MemoryModel",
    "Pipeline",
    "Plan",
    "PlanRequest",
    "RequestError",
    "Schedule",
    "cut",
    "make_plan",
    "mesh",
    "plan",
    "read_plan",
]


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        from zbpp.pipeline import Pipeline

        return Pipeline
    if name == "cut":
        from zbpp.models import cut

        return cut
    if name == "mesh":
        from zbpp.runtime.parallel.mesh import make_mesh

        return make_mesh
    raise AttributeError(f"module 'zbpp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
