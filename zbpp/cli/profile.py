"""The ``profile`` command: measure a costs file on the real devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from zbpp.cli.outputs import OUT
from zbpp.training.options import Count, ModelName, Output, RunOptions, Switch

__all__ = ["Profile"]


@dataclass(frozen=True, kw_only=True)
class Profile(RunOptions):
    """Measure a model's costs, per chunk and per layer, on the real devices.

    F, B, W, the loss, O, V, links and memory, from some steps, then from each layer
    alone; of the model of zbpp train, or of your own. Starts its own processes, or
    runs as one of torchrun's.
    """

    out: Annotated[Output, OUT]
    """Costs file to write: ms and bytes, one entry per chunk."""
    layers_out: Output | None = None
    """Also write the costs of each layer, to plan the split with."""
    model: ModelName | None = None
    """Returns (model, batch[, loss_fn]); or hf:PATH; else that of zbpp train."""
    rounds: Count = 8
    """Steps, and runs of each layer alone, that count after a warm-up."""
    json: Switch = False
    """Print one JSON object instead of the table."""

    def run(self, words: Sequence[str]) -> None:
        """Profile, and return when it is done."""
        from zbpp.training.profiled import run_profile
        from zbpp.training.setup import start_worker

        worker = partial(
            run_profile,
            out=self.out,
            layers_out=self.layers_out,
            rounds=self.rounds,
            as_json=self.json,
        )
        start_worker(worker, self, words)
