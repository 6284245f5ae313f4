"""The decision on a step by the sums over all stages, on every stage alike.

    norm finite, within the limit    the step stands as it was taken
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

__all__ = ["Decision", "StepResult", "StepSums", "decide"]


@dataclass(frozen=True)
class Decision:
    """The fate of a step; ``factor`` is what its gradients are multiplied by."""

    factor: float
    skipped: bool

    @property
    def requires_rollback(self) -> bool:
        """True if a step on the gradients as they are is invalid."""
        return self.skipped or self.factor < 1.0


def decide(norm: float, max_norm: float | None, loss: float = 0.0) -> Decision:
    """Judge a step by its global gradient norm and its loss.

    >>> decide(4.0, 2.0).requires_rollback, decide(1.0, 2.0).requires_rollback
    (True, False)
    """
    skipped = not math.isfinite(norm) or math.isnan(loss)
    if skipped or max_norm is None:
        return Decision(1.0, skipped)
    return Decision(min(1.0, max_norm / (norm + 1e-6)), skipped)


class StepSums:
    """The sums of one step over all stages, from the moment that they are under way.

        squared norms | losses, weights    | samples
        by layer      | of micro-batches   | of both ends

    Each process adds a vector of float64 that is zero but for its layers, its losses
    and its end, and has a row for each process of a stage. Every entry of the sum has
    one summand, so that it is exact, and rows are added in their order afterwards.
    Reading waits until all stages have ended the step, and for nothing else.

    Args:
        transport: moves the sums.
        norms: squared norms of the gradients of all layers.
        losses: and weights of all micro-batches.
        samples: numbers of what both ends were given; may be empty.
        step: number of the step, from 0.
        adds: the loss of the batch is the sum over micro-batches, not their mean.
    """

    def __init__(
        self,
        transport: Transport,
        norms: Tensor,
        losses: Tensor,
        samples: Tensor,
        *,
        step: int,
        adds: bool,
    ) -> None:
        self.step = step
        self._adds = adds
        self._peers = transport.peers
        parts = norms, losses.flatten(), samples
        self._sizes = [len(part) for part in parts]
        self._reduction = transport.reduce(torch.cat(parts))
        self._rows: Tensor | None = None

    def ready(self) -> bool:
        """True if they can be read without a stage of this process."""
        return self._rows is not None or self._reduction.ready()

    def done(self) -> bool:
        """True if they can be read at once; asking waits for nothing."""
        return self._rows is not None or self._reduction.done()

    def read(self, job: Job | None = None) -> Tensor:
        """Wait for them, a row for each peer; ``job`` is named if they do not come."""
        if self._rows is None:
            self._rows = self._peers.rows(self._reduction.result(job))
        return self._rows

    def _part(self, number: int) -> Tensor:
        return torch.split(self.read(), self._sizes, dim=1)[number]

    def squared_norms(self) -> Tensor:
        """Squared norm of the gradients of each layer."""
        return self._part(0).sum(dim=0)

    def norm(self) -> float:
        """Norm of all gradients of all stages, before clipping."""
        return float(self.squared_norms().sum().sqrt())

    def losses(self) -> Tensor:
        """Losses of the micro-batches of all replicas, and their weights."""
        rows = self._peers.replica_rows(self._part(1))
        return rows.view(len(rows), 2, -1).transpose(0, 1).reshape(2, -1)

    def loss(self) -> float:
        """Mean over the micro-batches by weight, or their sum; NaN without weights."""
        losses, weights = self.losses()
        if self._adds:
            return float((losses * weights).sum())
        return mean_by_weight(losses, weights)

    def samples(self) -> Tensor:
        """Numbers of the samples that processes were given, a row for each peer."""
        return self._part(2)

    def decision(self, max_norm: float | None) -> Decision:
        """Judge the step."""
        return decide(self.norm(), max_norm, self.loss())


@dataclass(frozen=True, repr=False)
class StepResult:
    """Loss and gradient norm of one step, the same on every rank.

    Reading waits until all stages have ended the step, and for nothing else: one rank
    may read, right after the step, while the others go on.

    Args:
        sums: of the step.
        clip_grad_norm: largest norm of all gradients; None: any.
        speculative: the step was taken before its norm was known.
        mean_metrics: reads the metrics, where the loss is; else gives none.
        outputs: of the last layer for all samples, without a graph, joined as `predict`
            joins them; None elsewhere than on the last stage, or if they were not
            asked for.
    """

    sums: StepSums
    clip_grad_norm: float | None
    speculative: bool
    mean_metrics: Callable[[], dict[str, float]] = dict
    outputs: Any = None

    def __repr__(self) -> str:
        """Show the numbers if they are there; unlike `str`, it never waits."""
        return str(self) if self.sums.done() else "<StepResult: the step is under way>"

    def __str__(self) -> str:
        return (
            f"StepResult(loss={self.loss:.6g}, grad_norm={self.grad_norm:.6g}, "
            f"skipped={self.skipped}, rollbacks={self.rollbacks})"
        )

    @property
    def loss(self) -> float:
        """Mean loss over the batch, before the step; see ``weigh`` of `Numerics`.

        NaN if no sample or token counts, or one micro-batch's loss is; then the step is
        skipped.
        """
        return self.sums.loss()

    @property
    def losses(self) -> tuple[float, ...]:
        """Mean loss over each micro-batch; 0 where no sample or token counts."""
        return tuple(self.sums.losses()[0].tolist())

    @property
    def metrics(self) -> dict[str, float]:
        """Means by weight of the metrics that ``loss_fn`` returns, on the last stage.

        Over the micro-batches of this process's replica; empty on other stages.
        """
        return self.mean_metrics()

    @property
    def grad_norm(self) -> float:
        """Norm of all gradients of all stages, before clipping."""
        return self.sums.norm()

    @property
    def skipped(self) -> bool:
        """True if there was no step: the norm was Inf or NaN, or the loss NaN."""
        return self.sums.decision(self.clip_grad_norm).skipped

    @property
    def rollbacks(self) -> int:
        """Times that the step was rolled back: 1 if it was speculative and invalid."""
        decision = self.sums.decision(self.clip_grad_norm)
        return int(self.speculative and decision.requires_rollback)
