"""Zero-bubble pipeline parallelism for PyTorch: plan, simulate, run.

``import zbpp`` loads no torch: `Pipeline` and `cut`, which do, are loaded when they are
first used.
"""

from typing import TYPE_CHECKING, Any

from zbpp.core import Costs, MemoryModel, RequestError, Schedule
from zbpp.modes import plan

if TYPE_CHECKING:
    from zbpp.models import cut
    from zbpp.pipeline import Pipeline

__all__ = [
    "Costs",
    "MemoryModel",
    "Pipeline",
    "RequestError",
    "Schedule",
    "cut",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        from zbpp.pipeline import Pipeline

        return Pipeline
    if name == "cut":
        from zbpp.models import cut

        return cut
    raise AttributeError(f"module 'zbpp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
