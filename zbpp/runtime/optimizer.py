"""The optimizer behind its barrier: norm over all stages, clip, step or skip.

Every stage puts the squared gradient norms of its layers into a vector with one entry
per layer of the whole model, and the last chunk's stage adds the losses. The vectors
are summed over the stages: each entry has one summand that is not zero, so the sum is
exact, and its entries are then added in layer order. The norm, the clip factor and
the decision are therefore the same bits on every stage, for any number of stages.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from zbpp.core import Job
from zbpp.runtime.stage import Stage
from zbpp.runtime.transport import Reduction, Transport

__all__ = ["MakeOptimizer", "StageOptimizer", "clip_factor"]

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Called with one stage's parameters."""


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What gradients of this global norm are multiplied by, at most 1."""
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


class StageOptimizer:
    """One stage's share of the optimizer step.

    Args:
        stage: whose parameters are stepped.
        make_optimizer: builds the optimizer; None leaves gradients to the caller.
        clip_grad_norm: largest global gradient norm; None: no clipping.
        n_layers: layers of the whole model.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        make_optimizer: MakeOptimizer | None,
        clip_grad_norm: float | None,
        n_layers: int,
    ) -> None:
        self._stage = stage
        self._clip = clip_grad_norm
        self._n_layers = n_layers
        self.parameters = [
            p
            for chunk in stage.chunks.values()
            for p in chunk.parameters()
            if p.requires_grad
        ]
        self.optimizer = (
            make_optimizer(self.parameters)
            if make_optimizer is not None and self.parameters
            else None
        )
        self._reduction: Reduction | None = None
        self.sums: Tensor | None = None
        """Squared norm per layer, then loss per micro-batch, summed over the stages."""

    def reduce(self, transport: Transport) -> None:
        """Start the sum of norms and losses over all stages."""
        vector = torch.zeros(
            self._n_layers + self._stage.n_microbatches,
            dtype=torch.float64,
            device=self._stage.device,
        )
        for layer, squared in self._squared_norms():
            vector[layer] = squared
        for microbatch, loss in self._stage.losses.items():
            vector[self._n_layers + microbatch] = loss
        self._reduction = transport.reduce(vector)

    def ready(self) -> bool:
        """Whether `step` goes on without another stage of this process."""
        return self._reduction is None or self._reduction.ready()

    def step(self, job: Job) -> None:
        """Wait for the norm; clip and step, or skip the step if it is not finite."""
        assert self._reduction is not None, "a Step needs a Reduce before it"
        self.sums = self._reduction.result(job)
        self._reduction = None
        if self.optimizer is None:
            return
        norm = float(self.sums[: self._n_layers].sum().sqrt())
        if math.isfinite(norm):
            factor = clip_factor(norm, self._clip)
            if factor < 1.0:
                for p in self.parameters:
                    if p.grad is not None:
                        p.grad.mul_(factor)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _squared_norms(self) -> Iterable[tuple[int, Tensor]]:
        """Squared gradient norm per layer, float64; a shared parameter counts once."""
        seen: set[nn.Parameter] = set()
        for chunk in self._stage.chunks.values():
            for index, layer in enumerate(chunk.layers, start=chunk.first):
                own = [p for p in layer.parameters() if p not in seen]
                seen.update(own)
                squares = [
                    torch.linalg.vector_norm(p.grad, dtype=torch.float64).square()
                    for p in own
                    if p.grad is not None
                ]
                if squares:
                    yield index, torch.stack(squares).sum()
