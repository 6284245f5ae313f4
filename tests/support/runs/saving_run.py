"""A run that saves; processes import it by this name, as they cannot a test's file."""

import os
import pickle
import signal
from pathlib import Path
from typing import Any

from histories import History, Injector, batch, make
from outcomes import look

__all__ = ["train_and_save"]


def save(pipeline: Any, folder: str, name: str) -> None:
    """All or nothing."""
    path = Path(folder) / f"rank{pipeline.rank}-{name}"
    draft = path.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(look(pipeline, [])))
    draft.rename(path.with_suffix(".state"))


def train_and_save(history: History, folder: str, fault: str) -> None:
    """A user's script: SIGTERM ends the loop after a step; an exception ends it."""
    os.environ["ZBPP_FAULT"] = fault
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    pipeline = make(history, None, post_validation=True, timeout_s=60)
    injector = Injector(pipeline)
    for step, event in enumerate(history.events):
        injector.begin(event)
        pipeline.step(*batch(history, step))
        if step % 2 == 1 or asked:
            save(pipeline, folder, f"after{step + 1}")
        if asked:
            return
