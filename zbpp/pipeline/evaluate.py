"""Loss and outputs of a pipeline's model on a batch that is not trained on."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from zbpp.core import Program, Schedule
from zbpp.runtime.driver import collective_calls as calls
from zbpp.runtime.driver.batches import Batches
from zbpp.runtime.driver.lifecycle import Lifecycle
from zbpp.runtime.driver.state_access import eval_mode
from zbpp.runtime.executor import Executor, drive
from zbpp.runtime.microbatches import Batch, check_samples
from zbpp.runtime.support.pytree import map_tensors
from zbpp.schedules import lower_forward

__all__ = ["Evaluating"]


class Evaluating:
    """The part of a pipeline that evaluates."""

    schedule: Schedule
    _executors: Mapping[int, Executor]
    _batches: Batches
    _lifecycle: Lifecycle
    _n_steps: int
    _forward_programs: tuple[int, Sequence[Program]] = (0, ())
    """Micro-batches of the last evaluation, and its programs."""

    if TYPE_CHECKING:

        @property
        def n_microbatches(self) -> int:
            """Micro-batches in a training step."""

        def synchronize(self) -> None:
            """Settle the last step; `zbpp.Pipeline` does."""

        def _layers(self) -> Iterator[tuple[str, nn.Module]]: ...

    def evaluate(
        self,
        inputs: Batch = None,
        targets: Batch = None,
        *,
        n_microbatches: int | None = None,
    ) -> float:
        """Mean loss over a batch, without gradients, in eval mode.

        Args:
            inputs: as for `step`.
            targets: as for `step`.
            n_microbatches: any number, the same on every rank; None: as in `step`.

        Raises:
            RequestError: the batch does not fit.
            PeerError: another stage died, did not answer, or does not evaluate.
        """
        inputs, targets = self._batches.pair(inputs, targets)
        with self._forwards(inputs, targets, n_microbatches, predicts=False):
            own = self._batches.samples(inputs, targets)
            loss, samples = calls.mean_loss(self._executors, own)
        check_samples(*samples)
        return loss

    def predict(
        self,
        inputs: Batch = None,
        *,
        n_microbatches: int | None = None,
        everywhere: bool = False,
    ) -> Any:
        """Outputs of the last chunk, without loss and gradients, in eval mode.

        Args:
            inputs: as for `step`; targets in it are not read.
            n_microbatches: any number, the same on every rank; None: as in `step`.
            everywhere: give all ranks the outputs, on the CPU; the same on every rank.

        Returns:
            The outputs of all samples where the last chunk is, elsewhere None. Tensors
            of the micro-batches are joined along their first dimension; micro-batches
            whose outputs differ in others come as a list.

        Raises:
            RequestError: the batch does not fit.
            PeerError: another stage died, did not answer, or does not predict.
        """
        inputs, _ = self._batches.pair(inputs, None)
        with self._forwards(inputs, None, n_microbatches, predicts=True):
            last = self.schedule.placement.stage_of[-1]
            outputs = calls.last_outputs(self._executors, last)
            if everywhere:
                own = map_tensors(outputs, lambda x: x.cpu())
                transport = next(iter(self._executors.values())).transport
                every = transport.gather_pipeline(own)
                outputs = next((one for one in every if one is not None), None)
        return outputs

    @contextmanager
    def _forwards(
        self, inputs: Batch, targets: Batch, n: int | None, *, predicts: bool
    ) -> Iterator[None]:
        """Run the forwards of a batch; within this their losses or outputs are read."""
        m = n or self.n_microbatches
        if self._forward_programs[0] != m:  # the placement never changes
            programs = lower_forward(self.schedule.placement, n_microbatches=m)
            self._forward_programs = m, programs
        self.synchronize()
        self._batches.begin(
            inputs,
            targets,
            step=self._n_steps,
            n_microbatches=m,
            training=False,
            predicts=predicts,
        )
        layers = (layer for _, layer in self._layers())
        with (
            self._lifecycle.running(),
            calls.failures_told(self._executors),
            eval_mode(layers),
        ):
            drive(self._executors, self._forward_programs[1], training=False)
            yield
