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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

import torch

from zbpp.runtime.comm.groups import Groups
from zbpp.runtime.support.errors import PeerError

__all__ = ["Failures", "Note", "root_cause"]

_LOOK_S = 0.05  # a peer breaks its connections just after it has written
_STORE_S = 2.0  # beyond that: for a store that may be gone
_POLL_S = 0.02
_MAX_ERROR_CHARS = 300  # of another process's error
_PATIENCE_S = 2.0  # for the notes of stages that see the connections break
_NOTHING_COMES_S = 0.05  # once the connections are broken

_T = TypeVar("_T")


@dataclass(frozen=True)
class Note:
    """The reason why a process stops.

    Args:
        call: what it was called for, say ``step 3``.
        cause: its own error; None: it has lost another process.
        lost: ranks that it has waited for; all of them, unless it is known better.
        order: a later note has a larger number.
    """

    call: str
    cause: str | None = None
    lost: Sequence[int] = ()
    order: int = 0


def root_cause(notes: Mapping[int, Note], ranks: Sequence[int]) -> tuple[str, bool]:
    """Say which rank failed first, and True if no later note can change that.

    Args:
        notes: of the processes that have written.
        ranks: of all processes, as the launcher counts them.

    >>> root_cause({0: Note("3", lost=[1]), 1: Note("3", "in 1F0: OSError")}, [0, 1])
    ('rank 1 failed first, in 1F0: OSError', True)
    >>> root_cause({0: Note("3", lost=[1]), 1: Note("3", lost=[2])}, [0, 1, 2])[0]
    'rank 2 has left no word: it was killed, hangs, or has left the loop'
    """
    causes = {rank: note for rank, note in notes.items() if note.cause}
    if causes:
        first = min(causes, key=lambda rank: causes[rank].order)
        return f"rank {ranks[first]} failed first, {causes[first].cause}", True
    silent = [rank for rank in range(len(ranks)) if rank not in notes]
    lost = {rank for note in notes.values() for rank in note.lost}
    suspects = [rank for rank in silent if rank in lost] or silent
    if suspects:
        who = ", ".join(str(ranks[rank]) for rank in suspects)
        word = "have left no word: they were killed, hang, or have left the loop"
        if len(suspects) == 1:
            word = "has left no word: it was killed, hangs, or has left the loop"
        calls = {note.call for note in notes.values()}
        hint = "" if "evaluate" not in calls else "; every rank must call evaluate()"
        return f"rank{'s' * (len(suspects) > 1)} {who} {word}{hint}", len(silent) == 1
    waiting = ", ".join(f"rank {ranks[i]}: {notes[i].call}" for i in sorted(notes))
    return f"all ranks wait ({waiting}); all must make the same calls", True


class Failures:
    """The waits of one stage for others: their limit, and what is said when one fails.

    Args:
        groups: are aborted at the first failure, so that all others fail at once; their
            store has the notes.
        rank: of this process, among all that step together.
        ranks: of all of them, as the launcher counts them.
        pipeline: ranks of this pipeline's processes among them, by stage.
        device: of this process.
        timeout_s: the longest time of a wait, at first.
    """

    def __init__(
        self,
        groups: Groups,
        rank: int,
        ranks: Sequence[int],
        *,
        pipeline: Sequence[int],
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.stage = pipeline.index(rank)
        self.current_call = "the start"
        self.has_failed = False
        self._groups = groups
        self._store = groups.store
        self._rank = rank
        self._ranks = tuple(ranks)
        self.pipeline = pipeline
        self.device = device
        self._has_written = False
        self.limit_waits(timeout_s)

    @property
    def timeout_s(self) -> float:
        """The longest time of a wait."""
        return self.timeout.total_seconds()

    def limit_waits(self, seconds: float) -> None:
        """Set the longest time of a wait."""
        self.timeout = timedelta(seconds=seconds)

    def peer_error(
        self, what: str, peer: int | None, *, is_late: bool = False
    ) -> PeerError:
        """Return the error of a message or sum that does not come.

        Args:
            what: this stage waits for, or could not begin.
            peer: the stage that was waited for; None: all.
            is_late: the time-out has passed; False: the connection broke.
        """
        lost = [] if peer is None else [self.pipeline[peer]]
        who = "the other stages" if peer is None else f"stage {peer}"
        why = "the connection broke"
        if is_late:
            why = f"no answer in {self.timeout_s:g} s"
        return self._make_peer_error(f"{what} {who}", lost, why, is_late=is_late)

    def replica_error(self, job: str, ranks: Iterable[int]) -> PeerError:
        """Return the error of a layer's collective that has broken in a job."""
        lost = [rank for rank in ranks if rank != self._rank]
        why = "they have not ended a collective"
        what = f"waits in {job} for its replicas"
        return self._make_peer_error(what, lost, why, is_late=True)

    def _make_peer_error(
        self, what: str, lost: Sequence[int], why: str, *, is_late: bool
    ) -> PeerError:
        """Find out who failed first, and break the connections.

        Others may have begun to wait later than this stage, by a part of a step.
        """
        patience_s = max(_PATIENCE_S, 0.1 * self.timeout_s * is_late)
        if self.has_failed:
            why = "the connections were given up after the first failure"
        elif first := self._explain(lost, patience_s):
            why = f"{why}; {first}"
        self.abort()
        return PeerError(f"stage {self.stage} {what}: {why}")

    def abort(self) -> None:
        """Let the others fail at once, and nothing here wait for them any more."""
        if not self.has_failed:
            self.has_failed = True
            self._groups.abort()
            self.timeout = timedelta(seconds=_NOTHING_COMES_S)

    def report(self, error: BaseException) -> str:
        """Write down this process's own error; return which rank was the first."""
        notes = [n for n in getattr(error, "__notes__", []) if n.startswith("in ")]
        where = notes[0] if notes else f"in {self.current_call}"
        text = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")
        note = Note(self.current_call, f"{where}: {text[:_MAX_ERROR_CHARS]}")
        return self._within(_STORE_S, lambda: self._write(note)) or ""

    def withdraw(self) -> None:
        """Take back what this process has written: it goes on."""
        if self._has_written:
            self._has_written = False
            self._within(_STORE_S, lambda: self._store.delete_key(str(self._rank)))

    def _explain(self, lost: Sequence[int], patience_s: float) -> str:
        """Write down that other processes are lost; say which was the first to fail.

        Args:
            lost: ranks that this process has waited for.
            patience_s: how long to wait for the notes of others that have lost it too.
        """

        def look() -> str:
            self._write(Note(self.current_call, lost=lost))
            start = time.monotonic()
            while True:
                text, is_certain = root_cause(self._read(), self._ranks)
                waited = time.monotonic() - start
                if waited > patience_s or (is_certain and waited > _LOOK_S):
                    return text
                time.sleep(_POLL_S)

        return self._within(patience_s + _STORE_S, look) or ""

    def _write(self, note: Note) -> str:
        """Write a note, unless there is an earlier one, and read them all."""
        if not self._has_written:
            self._has_written = True
            order = self._store.add("order", 1)
            fields = asdict(note) | {"order": order}
            self._store.set(str(self._rank), json.dumps(fields))
        return root_cause(self._read(), self._ranks)[0]

    def _read(self) -> dict[int, Note]:
        return {
            rank: Note(**json.loads(self._store.get(str(rank))))
            for rank in range(len(self._ranks))
            if self._store.check([str(rank)])
        }

    def _within(self, seconds: float, action: Callable[[], _T]) -> _T | None:
        """Do something with the store, or give up: nothing here may hide an error."""
        results: list[_T] = []

        def run() -> None:
            try:
                results.append(action())
            except (RuntimeError, ValueError, OSError):
                return  # the store is gone, and its server with it

        thread = threading.Thread(target=run, name="zbpp-failures", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is about to end
            return None
        thread.join(seconds)
        return results[0] if results else None
