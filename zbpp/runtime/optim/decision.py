"""The decision on a step by the sums over all stages, on every stage alike.

    norm finite, within the limit    the step stands as it was taken
    norm finite, above the limit     the gradients are clipped first
    norm Inf or NaN                  there is no step

A step that was taken before the sums were known is invalid in the last two cases.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from zbpp.core import Job
from zbpp.runtime.comm.peers import ALONE, Peers
from zbpp.runtime.comm.transport import Reduction

__all__ = ["Decision", "StepSums", "clip_factor", "decide"]


@dataclass(frozen=True)
class Decision:
    """The fate of a step; ``factor`` is what its gradients are multiplied by."""

    norm: float
    factor: float
    skipped: bool

    @property
    def corrects(self) -> bool:
        """A step on the gradients as they are is invalid."""
        return self.skipped or self.factor < 1.0


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Give the factor for gradients of this global norm, at most 1."""
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def decide(norm: float, max_norm: float | None) -> Decision:
    """Judge a step by its global gradient norm.

    >>> decide(4.0, 2.0).corrects, decide(1.0, 2.0).corrects
    (True, False)
    """
    skipped = not math.isfinite(norm)
    return Decision(norm, 1.0 if skipped else clip_factor(norm, max_norm), skipped)


class StepSums:
    """The sums of one step: squared norm of each layer, loss of each micro-batch.

    Reading them waits for the reduction, which needs no more of the other stages than
    that they have ended their step. They are read from it once.

    Args:
        reduction: under way.
        n_layers: of the whole model: so many squared norms.
        n_microbatches: so many losses come next, and as many weights of them.
        metrics: names; a value of each micro-batch for each of them next.
        n_tied: so many numbers on tied parameters next; the rest comes behind them.
        step: which one, from 0.
        peers: processes of the stage; each has such numbers of its own.
    """

    def __init__(
        self,
        reduction: Reduction,
        *,
        n_layers: int,
        n_microbatches: int,
        metrics: Sequence[str] = (),
        n_tied: int = 0,
        step: int,
        peers: Peers = ALONE,
    ) -> None:
        self._reduction = reduction
        self._n_layers = n_layers
        self._n_microbatches = n_microbatches
        self._metrics = metrics
        self._first_tied = n_layers + (2 + len(metrics)) * n_microbatches
        self._n_tied = n_tied
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
        by_layer = self.read(job)[:, : self._n_layers].sum(dim=0)
        return float(by_layer.sum().sqrt())

    def losses(self) -> Tensor:
        """Losses of the micro-batches of all replicas, and their weights."""
        return self._table()[:2]

    def loss(self) -> float:
        """Mean over the micro-batches by weight; NaN if all weights are 0."""
        return _mean(*self.losses())

    def metrics(self) -> dict[str, float]:
        """The same mean of each metric."""
        _, weights, *rows = self._table()
        return {
            name: _mean(row, weights)
            for name, row in zip(self._metrics, rows, strict=True)
        }

    def _table(self) -> Tensor:
        """Losses, weights and metrics, a row each, of all replicas' micro-batches."""
        size, n = 2 + len(self._metrics), self._n_microbatches
        rows = self._peers.of_replicas(self.read())
        rows = rows[:, self._n_layers : self._first_tied]
        return rows.reshape(-1, size, n).transpose(0, 1).reshape(size, -1)

    def tied(self) -> Tensor:
        """This peer's behind the losses and weights, see `zbpp.runtime.ties`."""
        return self.read()[self._peers.row, self._first_tied :][: self._n_tied]

    def notes(self) -> Tensor:
        """The entries behind all others, of the peer that has found most."""
        return self.read()[:, self._first_tied + self._n_tied :].amax(dim=0)


def _mean(values: Tensor, weights: Tensor) -> float:
    if weights[0] > 0 and bool((weights == weights[0]).all()):
        return float(values.mean())
    return float((values * weights).sum() / weights.sum())
