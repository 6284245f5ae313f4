"""The sums of a step over all stages, and the decision on the step by these sums.

    norm finite, within the limit    the step remains as it was taken
    norm finite, above the limit     the gradients are clipped first
    norm Inf or NaN, or loss NaN     there is no step

A step that was taken before the sums were known is invalid in the last two cases.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zbpp.core import Job
from zbpp.runtime.comm.transport import Transport
from zbpp.runtime.microbatches import mean_by_weight


@dataclass(frozen=True)
class Decision:
    """The decision on a step; its gradients are multiplied by ``factor``."""

    factor: float
    skipped: bool

    @property
    def requires_rollback(self) -> bool:
        """True if a step on the gradients as they are is invalid."""
        return self.skipped or self.factor < 1.0


class StepResult:
    """Loss and gradient norm of one step, the same on every rank.

    Reading waits until all stages have ended the step, and for nothing else: one rank
    may read, right after the step, while the others go on.

        squared norms | losses, weights    | digests
        by layer      | of micro-batches   | of samples

    Each process adds a vector of float64 that is zero but for its layers, its losses
    and its samples, and has a row for each process of a stage. Every entry of the sum
    has one summand, so that it is exact, and rows are added in their order afterwards.
    """

    def __init__(
        self,
        transport: Transport,
        norms: Tensor,
        losses: Tensor,
        digests: Tensor,
        *,
        step: int,
        adds: bool,
        clip_grad_norm: float | None,
        speculative: bool,
    ) -> None:
        self.step, self.speculative = step, speculative
        self.outputs: Any = None
        """Of the last layer for all samples, without a graph, joined as `predict` joins
        them; None elsewhere than on the last stage, or if they were not asked for."""
        self.mean_metrics: Callable[[], dict[str, float]] = dict
        self._adds, self._max_norm = adds, clip_grad_norm
        self._peers = transport.peers
        parts = norms, losses.flatten(), digests
        self._sizes = [len(part) for part in parts]
        self._reduction = transport.reduce(torch.cat(parts))
        self._rows: Tensor | None = None

    def ready(self) -> bool:
        """True if reading needs no other stage of this process."""
        return self._rows is not None or self._reduction.ready()

    def wait(self, job: Job | None = None) -> Tensor:
        """Wait for the sums, a row for each peer; an error names ``job``."""
        if self._rows is None:
            self._rows = self._peers.rows(self._reduction.result(job))
        return self._rows

    def _part(self, number: int) -> Tensor:
        return torch.split(self.wait(), self._sizes, dim=1)[number]

    def __repr__(self) -> str:
        """Show the numbers if they are there; unlike `str`, it never waits."""
        is_done = self._rows is not None or self._reduction.done()
        return str(self) if is_done else "<StepResult: the step is under way>"

    def __str__(self) -> str:
        return (
            f"StepResult(loss={self.loss:.6g}, grad_norm={self.grad_norm:.6g}, "
            f"skipped={self.skipped}, rollbacks={self.rollbacks})"
        )

    def _losses(self) -> Tensor:
        """Losses of the micro-batches of all replicas, and their weights."""
        rows = self._peers.replica_rows(self._part(1))
        return rows.view(len(rows), 2, -1).transpose(0, 1).reshape(2, -1)

    @property
    def loss(self) -> float:
        """Mean loss over the batch, before the step; see ``weigh`` of `Numerics`.

        NaN if no sample or token counts, or one micro-batch's loss is; then the step is
        skipped.
        """
        losses, weights = self._losses()
        if self._adds:
            return float((losses * weights).sum())
        return mean_by_weight(losses, weights)

    @property
    def losses(self) -> tuple[float, ...]:
        """Mean loss over each micro-batch; 0 where no sample or token counts."""
        return tuple(self._losses()[0].tolist())

    @property
    def metrics(self) -> dict[str, float]:
        """Means by weight of the metrics that ``loss_fn`` returns, on the last stage.

        Over the micro-batches of this process's replica; empty on other stages.
        """
        return self.mean_metrics()

    def squared_norms(self) -> Tensor:
        """Squared norm of the gradients of each layer."""
        return self._part(0).sum(dim=0)

    @property
    def grad_norm(self) -> float:
        """Norm of all gradients of all stages, before clipping."""
        return float(self.squared_norms().sum().sqrt())

    def digests(self) -> Tensor:
        """Digests of the samples, a row for each peer."""
        return self._part(2)

    def decision(self) -> Decision:
        """Judge the step by its norm and its loss."""
        norm = self.grad_norm
        skipped = not math.isfinite(norm) or math.isnan(self.loss)
        if skipped or self._max_norm is None:
            return Decision(1.0, skipped)
        return Decision(min(1.0, self._max_norm / (norm + 1e-6)), skipped)

    @property
    def skipped(self) -> bool:
        """True if there was no step: the norm was Inf or NaN, or the loss NaN."""
        return self.decision().skipped

    @property
    def rollbacks(self) -> int:
        """Times that the step was rolled back: 1 if it was speculative and invalid."""
        return int(self.speculative and self.decision().requires_rollback)
