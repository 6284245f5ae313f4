"""Run programs with PyTorch; below `zbpp.pipeline` only this layer imports torch.

Read `stage` (F, B and W of one micro-batch), then `executor` (the loop that runs one
stage's program). Packages: `backward` splits, `compiled` what torch has compiled,
`comm` sends, `optim` steps and rolls back, `parallel` serves replicas and shards,
`driver` serves `zbpp.Pipeline`, `support` serves all. `policies` are its options.

What a script needs of it is below, loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zbpp.runtime.backward.split import SplitGraph, WeightQueue, split_forward
    from zbpp.runtime.backward.torch_stage import SplitModule
    from zbpp.runtime.comm.process_group import use_loopback
    from zbpp.runtime.optim.decision import StepResult
    from zbpp.runtime.policies import LossScaler
    from zbpp.runtime.support.errors import NonFiniteError, PeerError, ShapeError

_HOMES = {
    "LossScaler": "policies",
    "NonFiniteError": "support.errors",
    "PeerError": "support.errors",
    "ShapeError": "support.errors",
    "SplitGraph": "backward.split",
    "SplitModule": "backward.torch_stage",
    "StepResult": "optim.decision",
    "WeightQueue": "backward.split",
    "split_forward": "backward.split",
    "use_loopback": "comm.process_group",
}

__all__ = [
    "LossScaler",
    "NonFiniteError",
    "PeerError",
    "ShapeError",
    "SplitGraph",
    "SplitModule",
    "StepResult",
    "WeightQueue",
    "split_forward",
    "use_loopback",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"zbpp.runtime.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'zbpp.runtime' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
