"""``torchrun saving_run.py FOLDER FAULT``: a user's script that saves between steps."""

import pickle
import signal
import sys
from pathlib import Path
from typing import Any

from histories import History, Injector, batch, make
from outcomes import look

from zbpp.runtime.testing import inject

HISTORY = "history.pickle"


def save(pipeline: Any, folder: Path, name: str) -> None:
    """All or nothing."""
    path = folder / f"rank{pipeline.rank}-{name}"
    draft = path.with_suffix(".draft")
    draft.write_bytes(pickle.dumps(look(pipeline, [])))
    draft.rename(path.with_suffix(".state"))


def train_and_save(history: History, folder: Path) -> None:
    """SIGTERM ends the loop after a step; an exception ends it."""
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


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    inject(sys.argv[2])
    train_and_save(pickle.loads((folder / HISTORY).read_bytes()), folder)
