"""Find the stage that failed first: each writes down why it stops, before it stops.

    stage 2   ValueError in 2F1    writes "in 2F1: ValueError", breaks its connections
    stage 1   lost stage 2         writes "lost 2", reads, says that stage 2 was first
    stage 0   lost stage 1         writes "lost 1", reads, says that stage 2 was first

The notes lie in the store where the processes have met. It is read and written only
after a failure, in a thread that is given up if the store does not answer.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

__all__ = ["FailureNotes", "Note", "blame"]

_LOOK_S = 0.05  # a peer breaks its connections just after it has written
_STORE_S = 2.0  # beyond that: for a store that may be gone
_POLL_S = 0.02
_LONGEST = 300  # letters of another stage's error

_T = TypeVar("_T")


@dataclass(frozen=True)
class Note:
    """The reason why a stage stops.

    Args:
        doing: what it was called for, say ``step 3``.
        cause: its own error; None: it has lost another stage.
        lost: ranks that it has waited for; all of them, unless it is known better.
        order: a later note has a larger number.
    """

    doing: str
    cause: str | None = None
    lost: Sequence[int] = ()
    order: int = 0


def blame(notes: Mapping[int, Note], ranks: Sequence[int]) -> tuple[str, bool]:
    """Say which rank failed first, and True if no later note can change that.

    Args:
        notes: of the stages that have written.
        ranks: of the stages, as the launcher counts them.

    >>> blame({0: Note("3", lost=[1]), 1: Note("3", "in 1F0: OSError")}, [0, 1])
    ('rank 1 failed first, in 1F0: OSError', True)
    >>> blame({0: Note("3", lost=[1]), 1: Note("3", lost=[2])}, [0, 1, 2])[0]
    'rank 2 has left no word: it was killed, hangs, or has left the loop'
    """
    causes = {stage: note for stage, note in notes.items() if note.cause}
    if causes:
        first = min(causes, key=lambda stage: causes[stage].order)
        return f"rank {ranks[first]} failed first, {causes[first].cause}", True
    silent = [stage for stage in range(len(ranks)) if stage not in notes]
    lost = {stage for note in notes.values() for stage in note.lost}
    suspects = [stage for stage in silent if stage in lost] or silent
    if suspects:
        who = ", ".join(str(ranks[stage]) for stage in suspects)
        word = "have left no word: they were killed, hang, or have left the loop"
        if len(suspects) == 1:
            word = "has left no word: it was killed, hangs, or has left the loop"
        doings = {note.doing for note in notes.values()}
        hint = "" if "evaluate" not in doings else "; every rank must call evaluate()"
        return f"rank{'s' * (len(suspects) > 1)} {who} {word}{hint}", len(silent) == 1
    calls = ", ".join(f"rank {ranks[i]}: {notes[i].doing}" for i in sorted(notes))
    return f"all ranks wait ({calls}); all must make the same calls", True


class FailureNotes:
    """One stage's access to the notes of all.

    Args:
        store: of `torch.distributed`, for this pipeline alone.
        stage: of this process.
        ranks: of all stages, as the launcher counts them.
    """

    def __init__(self, store: Any, stage: int, ranks: Sequence[int]) -> None:
        self._store = store
        self._stage = stage
        self._ranks = tuple(ranks)
        self._has_written = False

    def report(self, error: BaseException, doing: str) -> str:
        """Write down this stage's own error; return which rank was the first."""
        notes = [n for n in getattr(error, "__notes__", []) if n.startswith("in ")]
        where = notes[0] if notes else f"in {doing}"
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        cause = f"{where}: {text[:_LONGEST]}"
        return self._within(_STORE_S, lambda: self._write(Note(doing, cause))) or ""

    def explain(self, lost: Sequence[int], doing: str, *, patience_s: float) -> str:
        """Write down that other stages are lost; say which was the first to fail.

        Args:
            lost: ranks that this stage has waited for.
            doing: what it was called for.
            patience_s: how long to wait for the notes of stages that have lost it too.
        """

        def look() -> str:
            self._write(Note(doing, lost=lost))
            start = time.monotonic()
            while True:
                text, is_certain = blame(self._read(), self._ranks)
                waited = time.monotonic() - start
                if waited > patience_s or (is_certain and waited > _LOOK_S):
                    return text
                time.sleep(_POLL_S)

        return self._within(patience_s + _STORE_S, look) or ""

    def withdraw(self) -> None:
        """Take back what this stage has written: it goes on."""
        if self._has_written:
            self._has_written = False
            self._within(_STORE_S, lambda: self._store.delete_key(str(self._stage)))

    def _write(self, note: Note) -> str:
        """Write a note, unless there is an earlier one, and read them all."""
        if not self._has_written:
            self._has_written = True
            order = self._store.add("order", 1)
            fields = asdict(note) | {"order": order}
            self._store.set(str(self._stage), json.dumps(fields))
        return blame(self._read(), self._ranks)[0]

    def _read(self) -> dict[int, Note]:
        found = {}
        for stage in range(len(self._ranks)):
            if self._store.check([str(stage)]):
                found[stage] = Note(**json.loads(self._store.get(str(stage))))
        return found

    def _within(self, seconds: float, action: Callable[[], _T]) -> _T | None:
        """Do something with the store, or give up: nothing here may hide an error."""
        results: list[_T] = []

        def run() -> None:
            try:
                results.append(action())
            except (RuntimeError, ValueError, OSError):
                return  # the store is gone, and its server with it

        thread = threading.Thread(target=run, name="zbpp-failure-notes", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is about to end
            return None
        thread.join(seconds)
        return results[0] if results else None
