"""The result of a step; nothing is computed or fetched before it is read."""

from dataclasses import dataclass
from typing import Any

from zbpp.runtime.optim.decision import Decision, StepSums, decide

__all__ = ["StepResult"]


@dataclass(frozen=True)
class StepResult:
    """Loss and gradient norm of one step, the same on every rank.

    Reading waits until all stages have ended the step, and for nothing else: one rank
    may read, right after the step, while the others go on.

    Args:
        sums: of the step.
        clip_grad_norm: largest norm of all gradients; None: any.
        speculative: the step was taken before its norm was known.
        first_metrics: the sums with the metrics, in the first step alone: names were
            not known when ``sums`` began.
        outputs: of the last layer for all samples, without a graph, joined as `predict`
            joins them; None elsewhere than on the last stage, or if they were not
            asked for.
    """

    sums: StepSums
    clip_grad_norm: float | None
    speculative: bool
    first_metrics: StepSums | None = None
    outputs: Any = None

    @property
    def loss(self) -> float:
        """Mean loss over the batch, before the step; see ``weigh`` of `Pipeline`.

        NaN if no sample or token counts.
        """
        return self.sums.loss()

    @property
    def losses(self) -> tuple[float, ...]:
        """Mean loss over each micro-batch; 0 where no sample or token counts."""
        return tuple(self.sums.losses()[0].tolist())

    @property
    def metrics(self) -> dict[str, float]:
        """Means of the metrics that ``loss_fn`` returns, taken as that of the loss."""
        return (self.first_metrics or self.sums).metrics()

    @property
    def grad_norm(self) -> float:
        """Norm of all gradients of all stages, before clipping."""
        return self.sums.norm()

    @property
    def skipped(self) -> bool:
        """True if the optimizer left the parameters alone: the norm was Inf or NaN."""
        return self._decision.skipped

    @property
    def rollbacks(self) -> int:
        """Times that the step was rolled back: 1 if it was speculative and invalid."""
        return int(self.speculative and self._decision.requires_rollback)

    @property
    def _decision(self) -> Decision:
        return decide(self.sums.norm(), self.clip_grad_norm)
