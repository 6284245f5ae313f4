"""Hand the batch of a step to the stages that read it."""

from collections.abc import Mapping

from zbpp.core import Placement, RequestError
from zbpp.runtime.executor import Executor
from zbpp.runtime.microbatches import (
    Batch,
    samples_to_cut,
    split_inputs,
    split_targets,
)

__all__ = ["Batches", "check_samples"]


class Batches:
    """Cuts batches, and compares inputs with targets.

    Args:
        executors: of this process, by stage.
        placement: of the chunks.
    """

    def __init__(self, executors: Mapping[int, Executor], placement: Placement) -> None:
        self._executors = executors
        self._first, self._last = placement.stage_of[0], placement.stage_of[-1]
        self._transport = next(iter(executors.values())).transport
        self._samples: tuple[int | None, int | None] | None = None

    def begin(
        self,
        inputs: Batch | None,
        targets: Batch | None,
        *,
        step: int,
        n_microbatches: int,
        training: bool,
    ) -> None:
        """Begin a step or an evaluation: give the stages the micro-batches they read.

        Args:
            inputs: for the first chunk.
            targets: for the last.
            step: its number.
            n_microbatches: how many to cut the batch into.
            training: refuse micro-batches of different sizes.

        Raises:
            RequestError: a batch is missing, or cannot be cut so.
        """
        m = n_microbatches
        self._transport.doing = f"step {step}" if training else "evaluate"
        try:
            here = self._first in self._executors
            cut_inputs = split_inputs(inputs, m, even=training) if here else None
            here = self._last in self._executors
            cut_targets = split_targets(targets, m, even=training) if here else None
            self._compare(inputs, targets, training=training)
        except RequestError as error:
            self._transport.report(error, ends=False)
            raise
        for stage, executor in self._executors.items():
            executor.stage.begin(
                step=step,
                inputs=cut_inputs if stage == self._first else None,
                targets=cut_targets if stage == self._last else None,
                n_microbatches=m,
            )

    def samples(
        self, inputs: Batch | None, targets: Batch | None
    ) -> tuple[int | None, int | None]:
        """Samples of inputs and targets where this process reads them, else None."""
        return (
            samples_to_cut(inputs) if self._first in self._executors else None,
            samples_to_cut(targets) if self._last in self._executors else None,
        )

    def _compare(
        self, inputs: Batch | None, targets: Batch | None, *, training: bool
    ) -> None:
        """Compare what is known here; stages told each other in the first step.

        Between processes an evaluation compares afterwards, in the sum of its losses.
        """
        own = self.samples(inputs, targets)
        if not training or self._first == self._last:
            check_samples(*own)
        elif self._samples is None:
            rows = zip(*self._transport.gather(own), strict=True)
            known = [[n for n in row if n is not None] for row in rows]
            told = tuple(row[0] if row else None for row in known)
            check_samples(*told)
            self._samples = told[0], told[1]
        elif self._first in self._executors:
            check_samples(*own)
        elif None not in (self._samples[0], own[1]) and own[1] != self._samples[0]:
            raise RequestError(
                f"targets has {own[1]} samples, but inputs had {self._samples[0]} in "
                "the first step; all steps must have the same number of both"
            )


def check_samples(n_inputs: int | None, n_targets: int | None) -> None:
    """Compare two numbers of samples, where both are known.

    Raises:
        RequestError: they differ.
    """
    if None not in (n_inputs, n_targets) and n_inputs != n_targets:
        raise RequestError(
            f"inputs has {n_inputs} samples and targets {n_targets}; they must have "
            "the same number, or be lists of micro-batches"
        )
