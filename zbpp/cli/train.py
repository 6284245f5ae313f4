"""The ``train`` command: the options of a training, and its start."""

from dataclasses import dataclass

from zbpp.cli.outputs import check_outputs
from zbpp.cli.several import command_words
from zbpp.training.options import TrainOptions

__all__ = ["Train"]


@dataclass(frozen=True, kw_only=True)
class Train(TrainOptions):
    """Train a small Llama-style model on bytes of text, split over a pipeline.

    Starts its own processes, or runs as one of torchrun's. In fp32 on CPUs the losses
    and the final parameters depend on neither the mode nor the number of stages.
    """

    def run(self) -> None:
        """Train, and return when it is done."""
        check_outputs(metrics=self.metrics, trace=self.trace)
        from zbpp.training.start import start

        start(self, command_words(self))
