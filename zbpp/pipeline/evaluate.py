"""The loss of a pipeline's model on a batch that is not trained on."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from zbpp.core import Schedule
from zbpp.runtime.driver import collective_calls as calls
from zbpp.runtime.driver.batches import Batches, check_samples
from zbpp.runtime.driver.lifecycle import Lifecycle
from zbpp.runtime.driver.state_access import eval_mode
from zbpp.runtime.executor import Executor, drive
from zbpp.runtime.microbatches import Batch
from zbpp.schedules import lower_forward

__all__ = ["Evaluating"]


class Evaluating:
    """The part of a pipeline that evaluates."""

    schedule: Schedule
    _executors: Mapping[int, Executor]
    _batches: Batches
    _lifecycle: Lifecycle
    _n_steps: int

    if TYPE_CHECKING:

        @property
        def n_microbatches(self) -> int:
            """Micro-batches in a training step."""

        def synchronize(self) -> None:
            """Settle the last step; `zbpp.Pipeline` does."""

        def _layers(self) -> Iterator[tuple[str, nn.Module]]: ...

    def evaluate(
        self,
        inputs: Batch | None = None,
        targets: Batch | None = None,
        *,
        n_microbatches: int | None = None,
    ) -> float:
        """Mean loss over the samples of a batch, without gradients, in eval mode.

        Args:
            inputs: as for `step`; the last micro-batch may be smaller.
            targets: as for `step`.
            n_microbatches: any number, the same on every rank; None: as in `step`.

        Raises:
            RequestError: the batch does not fit.
            PeerError: another stage died, did not answer, or does not evaluate.
        """
        m = n_microbatches or self.n_microbatches
        programs = lower_forward(self.schedule.placement, n_microbatches=m)
        self.synchronize()
        self._batches.begin(
            inputs, targets, step=self._n_steps, n_microbatches=m, training=False
        )
        layers = (layer for _, layer in self._layers())
        with (
            self._lifecycle.running(),
            calls.failures_told(self._executors),
            eval_mode(layers),
        ):
            drive(self._executors, programs, training=False)
            own = self._batches.samples(inputs, targets)
            loss, samples = calls.mean_loss(self._executors, own)
        check_samples(*samples)
        return loss
