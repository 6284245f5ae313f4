"""The ``profile`` command: measure a costs file on the real devices."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated

from zbpp.cli.outputs import OUT
from zbpp.core import RequestError
from zbpp.planning import Plan
from zbpp.training.options import (
    Count,
    ModelName,
    Output,
    RunOptions,
    Switch,
    TrainOptions,
)
from zbpp.training.user_model import UserModel, load_model

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
        options = self._options()
        from zbpp.training.profiled import run_profile
        from zbpp.training.setup import start_worker

        load = None if self.model is None else self._load
        worker = partial(
            run_profile,
            load=load,
            out=self.out,
            layers_out=self.layers_out,
            rounds=self.rounds,
            as_json=self.json,
        )
        start_worker(worker, options, words, check=self._check)

    def _load(self) -> UserModel:
        assert self.model is not None
        return load_model(self.model, seq=self.seq, samples=self.microbatch_size)

    def _options(self) -> TrainOptions:
        """The options of the run whose passes are timed; the request has the model."""
        names = {field.name for field in fields(RunOptions)} - {"model"}
        options = TrainOptions(**{name: getattr(self, name) for name in names})
        if self.model is not None and self.layers is not None:
            raise RequestError(
                "--layers does not go with --model; leave one of them out"
            )
        return options

    def _check(self, _: TrainOptions, plan: Plan) -> None:
        if self.model is not None:
            n_chunks = plan.schedule.placement.n_chunks
            n_layers = self._load().n_layers
            if n_layers < n_chunks:
                raise RequestError(
                    f"--model {self.model} has {n_layers} layers for "
                    f"{n_chunks} chunks; use fewer stages"
                )
