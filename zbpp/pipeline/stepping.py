"""One training step of a pipeline."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zbpp.core import PassKind, Program, Schedule
from zbpp.pipeline.exhausted import memory_explained
from zbpp.pipeline.reports import summarize_split
from zbpp.planning import Plan
from zbpp.runtime.backward.causes import NO_WEIGHT
from zbpp.runtime.driver import collective_calls as calls
from zbpp.runtime.driver.batches import Batches
from zbpp.runtime.driver.lifecycle import Lifecycle
from zbpp.runtime.executor import Executor, drive
from zbpp.runtime.microbatches import Batch
from zbpp.runtime.optim.result import StepResult
from zbpp.runtime.support.errors import PeerError

__all__ = ["Stepping"]

_IN_B = f"B: {NO_WEIGHT}"


class Stepping:
    """The part of a pipeline that trains."""

    schedule: Schedule
    chosen: Plan
    _executors: Mapping[int, Executor]
    _programs: Sequence[Program]
    _batches: Batches
    _lifecycle: Lifecycle
    _n_steps: int
    _watcher: Any
    _knows_metrics = False
    """All processes have heard which metrics ``loss_fn`` returns."""
    _is_split_known = False

    if TYPE_CHECKING:

        @property
        def n_microbatches(self) -> int:
            """Micro-batches in a training step."""

    def step(
        self,
        inputs: Batch = None,
        targets: Batch = None,
        *,
        return_outputs: bool = False,
    ) -> StepResult:
        """Train on one batch: all micro-batches, then the optimizer.

        Args:
            inputs: for the first chunk; read only where `needs_inputs`. Tensors of
                shape (samples, ...), alone or in tuples and dicts, or a list with one
                entry per micro-batch. A model that knows how to cut its batch (one of
                Hugging Face's does) takes it whole here, without targets, on the ranks
                that need either.
            targets: for the loss; read only where `needs_targets`.
            return_outputs: keep the last layer's outputs, for ``result.outputs`` on
                the last stage; asked for there, or on every rank.

        Raises:
            RequestError: the batch does not fit.
            PeerError: another stage died or did not answer.
        """
        inputs, targets = self._batches.pair(inputs, targets)
        self._batches.begin(
            inputs,
            targets,
            step=self._n_steps,
            n_microbatches=self.n_microbatches,
            training=True,
            keeps_outputs=return_outputs,
        )
        try:
            with (
                self._lifecycle.running(),
                calls.failures_told(self._executors),
                memory_explained(self._executors, self.schedule, self.chosen),
            ):
                drive(self._executors, self._programs)
        except BaseException as error:
            self._count_torn_step(error)
            raise
        self._n_steps += 1
        if not self._is_split_known:
            self._is_split_known = True
            warn_of_split(self._executors, self.schedule)
        result = next(iter(self._executors.values())).optimizer.result
        assert result is not None
        if not self._knows_metrics:
            with calls.failures_told(self._executors):
                result = replace(
                    result, first_metrics=calls.learn_metrics(self._executors)
                )
            self._knows_metrics = True
        if return_outputs:
            last = self.schedule.placement.stage_of[-1]
            result = replace(result, outputs=calls.last_outputs(self._executors, last))
        if self._watcher is not None:
            with calls.failures_told(self._executors):
                self._watcher.after_step(self)
        return result

    def _count_torn_step(self, error: BaseException) -> None:
        """Count the step that an error ends if the state will be the one after it."""
        transport = next(iter(self._executors.values())).transport
        if isinstance(error, PeerError) and transport.on_device:
            return  # the host was ahead: a gradient that it counts may never come
        if all(executor.optimizer.counts for executor in self._executors.values()):
            self._n_steps += 1
            error.add_note(
                f"step {self._n_steps - 1} had all its gradients and counts: the state "
                f"is that after {self._n_steps} steps; step learning-rate schedulers "
                "for it before you save"
            )


def warn_of_split(executors: Mapping[int, Executor], schedule: Schedule) -> None:
    """Warn once where W has less to do than is kept in B for a reason to be mended.

    Embeddings, norms and biases do not count: nothing of theirs could wait.

    Args:
        executors: of this process, which have run a step.
        schedule: of the step.
    """
    if not schedule.runs(PassKind.W):
        return
    where = calls.report_split(executors)
    sizes = calls.leaf_sizes(executors)
    in_w = sum(sizes[name] for name, text in where.items() if text == "W")
    kept = sum(sizes[name] for name, text in where.items() if text not in ("W", _IN_B))
    if in_w < kept:
        warnings.warn(
            f"{schedule.name} gains little here: {summarize_split(where, sizes)}; "
            "pipeline.split_report() names them, and '1F1B' is as fast",
            stacklevel=3,
        )
