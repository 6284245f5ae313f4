"""What a step hands back; nothing is computed or fetched before it is read."""

import math
from dataclasses import dataclass

from torch import Tensor

__all__ = ["StepResult"]


@dataclass(frozen=True)
class StepResult:
    """Loss and gradient norm of one step, the same on every rank.

    Args:
        sums: squared gradient norm of each layer, then the loss of each micro-batch.
        n_layers: how many of them are norms.
    """

    sums: Tensor
    n_layers: int
    rollbacks: int = 0

    @property
    def loss(self) -> float:
        """Mean loss over the micro-batches, before the step."""
        return float(self.sums[self.n_layers :].mean())

    @property
    def grad_norm(self) -> float:
        """Norm of all gradients of all stages, before clipping."""
        return float(self.sums[: self.n_layers].sum().sqrt())

    @property
    def skipped(self) -> bool:
        """Whether the optimizer left the parameters alone: the norm was Inf or NaN."""
        return not math.isfinite(self.grad_norm)
