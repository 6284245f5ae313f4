"""The ``profile`` command: measure a costs file on the real devices."""

import importlib.util
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from zbpp.cli.user_model import UserModel, load_model
from zbpp.core import RequestError, Schedule
from zbpp.training.options import Train

__all__ = ["ProfileCommand"]

_MODEL = tyro.conf.arg(metavar="MODULE:FUNCTION")
_PATH = tyro.conf.arg(metavar="PATH")


@dataclass(frozen=True, kw_only=True)
class ProfileCommand(Train):
    """Measure a model's costs, per chunk and per layer, on the real devices.

    F, B, W, the loss, O, V, norms, links and memory, with quartiles; of the model of
    zbpp train, or of your own. Starts its own processes, or runs as one of torchrun's.
    """

    out: Annotated[Path, _PATH]
    """Costs file to write: ms and bytes, one entry per chunk."""
    layers_out: Annotated[Path | None, _PATH] = None
    """Also write the costs of each layer, to plan the split with."""
    model: Annotated[str | None, _MODEL] = None
    """A function that returns (model, batch) or (model, batch, loss_fn), the batch of
    one micro-batch; or hf:PATH, a config.json of transformers or its folder, with
    --seq tokens and --microbatch_size samples; left out: the model of zbpp train."""
    rounds: int = 10
    """Passes that are counted, after a warm-up."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object instead of the table."""

    def run(self) -> None:
        """Profile, and return when it is done.

        Raises:
            RequestError: the request is wrong or cannot be met.
            WorkerError: a process failed.
        """
        if importlib.util.find_spec("torch") is None:
            raise RequestError("a profile needs torch: pip install 'zbpp[train]'")
        from zbpp.training.profiled import ProfileRequest, run_profile
        from zbpp.training.start import start_worker

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # of torch's memory profiler
        load = None if self.model is None else self._load
        request = ProfileRequest(
            load, self.out, self.layers_out, self.rounds, self.json
        )
        options = replace(self, model=None)  # the request has it
        start_worker(partial(run_profile, request), options, check=self._check)

    def _load(self) -> UserModel:
        assert self.model is not None
        return load_model(self.model, seq=self.seq, samples=self.microbatch_size)

    def _check(self, _: Train, schedule: Schedule) -> None:
        if self.rounds < 1:
            raise RequestError(f"--rounds is {self.rounds}; it must be at least 1")
        for flag in ("out", "layers_out"):
            path = getattr(self, flag)
            if path is None:
                continue
            if path.is_dir() or not os.access(path.parent, os.W_OK):
                raise RequestError(
                    f"--{flag} {path} cannot be written; give the path of a file in a "
                    "folder that exists"
                )
        if self.model is not None:
            n_layers = self._load().n_layers
            if n_layers < schedule.placement.n_chunks:
                raise RequestError(
                    f"--model {self.model} has {n_layers} layers for "
                    f"{schedule.placement.n_chunks} chunks; use fewer stages"
                )
