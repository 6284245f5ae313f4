"""Save a training at intervals, and resume one that has stopped.

The place in the data is the number of samples so far, whatever the number of stages;
what a step draws depends on the seed and the step alone.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from zbpp.checkpoint import CheckpointError, locked
from zbpp.core import RequestError
from zbpp.pipeline import Pipeline
from zbpp.training.log import Recorder
from zbpp.training.options import TrainOptions

__all__ = ["CHECKPOINT", "RunSaver", "check_saving", "folder_of_one_run"]

CHECKPOINT = "a checkpoint"
"""Key of the last save among a recorder's problems."""
_EVERY, _KEEP = 100, 3
"""Steps between checkpoints, and the number of them that stay."""


def check_saving(options: TrainOptions) -> None:
    """Find before any process is started what would stop the run."""
    folder = options.save_dir
    if folder is not None and folder.exists() and not folder.is_dir():
        raise RequestError(f"--save_dir {folder} is no folder")


@contextmanager
def folder_of_one_run(pipeline: Pipeline, folder: Path | None) -> Iterator[None]:
    """Lock the folder that a run saves in (every rank must call).

    Raises:
        RequestError: another run has locked it.
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
        options: TrainOptions,
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
        """Load the newest whole checkpoint of the folder, if any; return a line for it.

        Raises:
            CheckpointError: all checkpoints are damaged.
            RequestError: it is one of another training.
        """
        folder = self._options.save_dir
        if folder is None:
            return None
        try:
            extra = self._pipeline.load(folder, missing_ok=True)
        except CheckpointError:
            raise
        except RequestError as error:
            raise RequestError(
                f"the newest checkpoint in {folder} is of another model: {error}; give "
                "the same options, or another --save_dir"
            ) from error
        if not extra:
            return None
        step = self._saved = self._pipeline.n_steps
        differences = [
            f"{name} {extra.get(name)}, now {value}"
            for name, value in self._same.items()
            if extra.get(name) != value
        ]
        if differences:
            raise RequestError(
                f"the checkpoint of step {step} in {folder} is of another training: "
                f"{'; '.join(differences)}; give the same options and text, or another "
                "--save_dir"
            )
        self._samples = int(extra["samples"])
        return f"resumed after step {step} ({self._samples:,} samples) from {folder}"

    def after_step(self, recorder: Recorder) -> None:
        """Save if it is time to, and what the recorder has to write before it."""
        self._samples += self._per_step
        saves = self._options.save_dir is not None
        if saves and self._pipeline.n_steps % _EVERY == 0:
            recorder.finish_steps()  # a run that resumes here will not do it
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
            self._pipeline.save(folder, keep=_KEEP, extra=extra)
        except CheckpointError as error:  # a full disk ends no training
            recorder.note(CHECKPOINT, str(error))
        else:
            self._saved = self._pipeline.n_steps
            recorder.problems.pop(CHECKPOINT, None)
