"""The decision on a step by the sums over all stages, on every stage alike.

    norm finite, within the limit    the step stands as it was taken
    norm finite, above the limit     the gradients are clipped first
    norm Inf or NaN, or loss NaN     there is no step

A step that was taken before the sums were known is invalid in the last two cases.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zbpp.core import Job
from zbpp.runtime.comm.stage_group import ALONE, StageGroup
from zbpp.runtime.comm.transport import Reduction
from zbpp.runtime.microbatches import mean_by_weight
from zbpp.runtime.optim.same_samples import SameSamples

__all__ = [
    "Decision",
    "StepResult",
    "StepSums",
    "StepVectorLayout",
    "clip_factor",
    "decide",
]


@dataclass(frozen=True)
class Decision:
    """The fate of a step; ``factor`` is what its gradients are multiplied by."""

    norm: float
    factor: float
    skipped: bool

    @property
    def requires_rollback(self) -> bool:
        """True if a step on the gradients as they are is invalid."""
        return self.skipped or self.factor < 1.0


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Give the factor for gradients of this global norm, at most 1."""
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def decide(norm: float, max_norm: float | None, loss: float = 0.0) -> Decision:
    """Judge a step by its global gradient norm and its loss.

    >>> decide(4.0, 2.0).requires_rollback, decide(1.0, 2.0).requires_rollback
    (True, False)
    """
    skipped = not math.isfinite(norm) or math.isnan(loss)
    return Decision(norm, 1.0 if skipped else clip_factor(norm, max_norm), skipped)


@dataclass(frozen=True)
class StepVectorLayout:
    """The places of a step's numbers in the vector that is summed over the stages.

        squared norms | losses, weights       | samples
        by layer      | rows of micro-batches | by end

    Args:
        n_layers: of the whole model.
        n_microbatches: of the step.
        adds: the loss of the batch is the sum over micro-batches.
        n_samples: numbers that tell which samples a stage was given.
    """

    n_layers: int
    n_microbatches: int
    adds: bool = False
    n_samples: int = 0

    @property
    def sizes(self) -> list[int]:
        """Numbers of each kind, in their order."""
        return [self.n_layers, 2 * self.n_microbatches, self.n_samples]

    def vector(
        self,
        device: torch.device,
        *,
        norms: Iterable[tuple[int, Tensor]],
        losses: Tensor | None,
        samples: SameSamples | None,
    ) -> Tensor:
        """Make one stage's vector, float64; each entry of another stage is zero.

        Args:
            device: of the stage.
            norms: layers and their squared norms.
            losses: of the stage with the last chunk; None: another process of the
                stage counts them.
            samples: of this process; None: they are not compared.
        """
        sizes = self.sizes
        vector = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        norm_part, loss_part, end_part = torch.split(vector, sizes)
        for layer, squared in norms:
            norm_part[layer] = squared
        if losses is not None:
            loss_part.copy_(losses.flatten())
        if samples is not None:
            samples.write(end_part)
        return vector


class StepSums:
    """The sums of one step: squared norm of each layer, loss of each micro-batch.

    Reading them waits for the reduction, which needs no more of the other stages than
    that they have ended their step.

    Args:
        reduction: under way, of vectors with this layout.
        layout: of the vectors.
        step: number of the step, from 0.
        peers: processes of the stage; the sums have a row for each of them.
    """

    def __init__(
        self,
        reduction: Reduction,
        layout: StepVectorLayout,
        *,
        step: int,
        peers: StageGroup = ALONE,
    ) -> None:
        self._reduction = reduction
        self._layout = layout
        self.step = step
        self._peers = peers
        self._host: Tensor | None = None

    def ready(self) -> bool:
        """True if they can be read without a stage of this process."""
        return self._host is not None or self._reduction.ready()

    def done(self) -> bool:
        """True if they can be read at once; asking waits for nothing."""
        return self._host is not None or self._reduction.done()

    def read(self, job: Job | None = None) -> Tensor:
        """Wait for them, a row for each peer; ``job`` is named if they do not come."""
        if self._host is None:
            self._host = self._peers.rows(self._reduction.result(job))
        return self._host

    def norm(self, job: Job | None = None) -> float:
        """Norm of all gradients of all stages, before clipping."""
        return float(self.squared_norms(job).sum().sqrt())

    def squared_norms(self, job: Job | None = None) -> Tensor:
        """Squared norm of the gradients of each layer."""
        return self._part(0, job).sum(dim=0)

    def losses(self) -> Tensor:
        """Losses of the micro-batches of all replicas, and their weights."""
        rows = self._peers.replica_rows(self._part(1))
        table = rows.reshape(-1, 2, self._layout.n_microbatches)
        return table.transpose(0, 1).reshape(2, -1)

    def loss(self) -> float:
        """Mean over the micro-batches by weight, or their sum; NaN without weights."""
        losses, weights = self.losses()
        if self._layout.adds:
            return float((losses * weights).sum())
        return mean_by_weight(losses, weights)

    def decision(self, max_norm: float | None, job: Job | None = None) -> Decision:
        """Judge the step."""
        return decide(self.norm(job), max_norm, self.loss())

    def samples(self) -> Tensor:
        """Numbers of the samples that processes were given, a row for each peer."""
        return self._part(2)

    def _part(self, number: int, job: Job | None = None) -> Tensor:
        """The numbers of one kind, a row for each peer."""
        return torch.split(self.read(job), self._layout.sizes, dim=1)[number]


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
        return self._decision.skipped

    @property
    def rollbacks(self) -> int:
        """Times that the step was rolled back: 1 if it was speculative and invalid."""
        return int(self.speculative and self._decision.requires_rollback)

    @property
    def _decision(self) -> Decision:
        return self.sums.decision(self.clip_grad_norm)
