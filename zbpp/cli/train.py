"""The ``train`` command: the options of a training, and its start."""

from dataclasses import dataclass
from pathlib import Path

from zbpp.cli.outputs import check_outputs
from zbpp.training.options import Train, flag

__all__ = ["TrainCommand"]


@dataclass(frozen=True, kw_only=True)
class TrainCommand(Train):
    """Train a small Llama-style model on bytes of text, split over a pipeline.

    Starts its own processes, or runs as one of torchrun's. In fp32 on CPUs the losses
    and the final parameters depend on neither the mode nor the number of stages.
    """

    config: Path | None = flag("flags in a TOML file; typed ones overrule it", None)

    def run(self) -> None:
        """Train, and return when it is done."""
        check_outputs(metrics=self.metrics, costs_out=self.costs_out, trace=self.trace)
        from zbpp.training.start import start

        start(self)
