"""The ``train`` command: the options of a training, and its start."""

from collections.abc import Sequence
from dataclasses import dataclass

from zbpp.training.options import TrainOptions


@dataclass(frozen=True, kw_only=True)
class Train(TrainOptions):
    """Train a small Llama-style model on bytes of text, split over a pipeline.

    Starts its processes, or runs as one of torchrun's. In fp32 on CPUs the losses
    and the final parameters depend on neither the mode nor the number of stages.
    """

    def run(self, words: Sequence[str]) -> None:
        """Train, and return when it is done."""
        from zbpp.training.launch import start
        from zbpp.training.setup import plan_of
        from zbpp.training.train import check, train

        grace_s = 10 if self.save_dir is None else 60
        start(train, self, words, plan=plan_of, check=check, grace_s=grace_s)
