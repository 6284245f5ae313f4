"""Save a training now and then, and go on where one has stopped.

The place in the data is the number of samples so far, whatever the number of stages;
what a step draws depends on the seed and the step alone.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from zbpp.checkpoint import CheckpointError, last_step, locked, newest
from zbpp.core import RequestError
from zbpp.pipeline import Pipeline
from zbpp.training.log import Recorder
from zbpp.training.options import Train

__all__ = ["CHECKPOINT", "RunSaver", "check_saving", "folder_of_one_run", "resumed"]

CHECKPOINT = "a checkpoint"
"""Key of the last save among a recorder's problems."""


def check_saving(options: Train) -> None:
    """Find before any process is started what would stop the run."""
    folder, asked = options.save_dir, options.resume
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"--save_dir {folder} is no folder")
    if asked == "none" and _has_checkpoint(folder):
        raise RequestError(
            f"{folder} holds checkpoints of a run; go on from them with "
            "--resume auto, or give another --save_dir"
        )
    if asked in ("auto", "none"):
        return
    # a restart goes on from the newest one, which must be of this run
    first, last = last_step(asked), last_step(folder)
    if first is not None and last is not None and last > first:
        raise RequestError(
            f"--resume {asked} is after step {first}, but {folder} has checkpoints up "
            f"to step {last}; give another --save_dir, or move the later ones away"
        )


def resumed(options: Train) -> Train:
    """Options of a run that starts again: it goes on from its own checkpoint."""
    if options.save_dir is not None and _has_checkpoint(options.save_dir):
        return replace(options, resume="auto")
    return options


def _has_checkpoint(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("step-*/manifest.json"))


@contextmanager
def folder_of_one_run(pipeline: Pipeline, folder: Path | None) -> Iterator[None]:
    """Hold the folder that a run saves in (every rank must call).

    Raises:
        RequestError: another run holds it.
    """
    with ExitStack() as stack:
        words = None
        if folder is not None and pipeline.rank == 0:
            try:
                stack.enter_context(locked(folder))
            except CheckpointError as error:
                words = f"--save_dir: {error}"
        if folder is not None and (words := pipeline.gather(words)[0]):
            raise RequestError(words)
        yield


class RunSaver:
    """Saves and loads of one run; every rank makes the same calls.

    Args:
        pipeline: its schedulers are attached.
        options: of the run.
        same: of the model and the text; a checkpoint of others is refused.
        samples: in a step.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        options: Train,
        *,
        same: Mapping[str, Any],
        samples: int,
    ) -> None:
        self._pipeline, self._options = pipeline, options
        self._per_step = samples
        self._samples = 0
        self._saved: int | None = None
        self._same: dict[str, Any] = {"seed": options.seed, **same}

    def resume(self) -> str | None:
        """Load the checkpoint that was asked for; gives a line about it.

        Raises:
            CheckpointError: it is not there, or damaged.
            RequestError: it is one of another training.
        """
        path = self._path()
        if path is None:
            return None
        try:
            extra = self._pipeline.load(path)
        except CheckpointError:
            raise
        except RequestError as error:
            raise RequestError(
                f"{path} is of another model: {error}; give the same options, or "
                "another --save_dir"
            ) from error
        differences = [
            f"{name} {extra.get(name)}, now {value}"
            for name, value in self._same.items()
            if extra.get(name) != value
        ]
        if differences:
            raise RequestError(
                f"{path} is of another training: {'; '.join(differences)}; give the "
                "same options and text, or another --save_dir"
            )
        self._samples = int(extra["samples"])
        step = self._saved = self._pipeline.n_steps
        return f"resumed after step {step} ({self._samples:,} samples) from {path}"

    def _path(self) -> Path | None:
        options = self._options
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
            options = resumed(options)
        if options.resume not in ("auto", "none"):
            return Path(options.resume)
        if options.resume == "none" or options.save_dir is None:
            return None
        latest = newest(options.save_dir) if self._pipeline.rank == 0 else None
        path: Path | None = self._pipeline.gather(latest)[0]
        return path

    def after_step(self, recorder: Recorder) -> None:
        """Save if it is time to, and what the recorder has to write before it."""
        self._samples += self._per_step
        every = self._options.save_every
        if every is not None and self._pipeline.n_steps % every == 0:
            recorder.finish_steps()  # a run that goes on from here will not do it
            self._save(recorder)

    def finish(self, recorder: Recorder) -> None:
        """Save what is not saved yet, and wait until it is on the disk."""
        if self._options.save_dir is None:
            return
        if self._saved != self._pipeline.n_steps:
            self._save(recorder)
        try:
            self._pipeline.finish_saving()
        except CheckpointError as error:
            recorder.note(CHECKPOINT, str(error))

    def _save(self, recorder: Recorder) -> None:
        folder = self._options.save_dir
        assert folder is not None, "the options were checked"
        extra = {"samples": self._samples, **self._same}
        try:
            self._pipeline.save(folder, keep=self._options.keep, extra=extra)
        except CheckpointError as error:  # a full disk ends no training
            recorder.note(CHECKPOINT, str(error))
        else:
            self._saved = self._pipeline.n_steps
            recorder.problems.pop(CHECKPOINT, None)
