"""Find the stage that failed first: each writes down why it stops, before it stops.

    stage 2   ValueError in 2F1   writes cause "in 2F1: ValueError", aborts its groups
    stage 1   lost stage 2        writes that it waits, reads that stage 2 was first
    stage 0   lost stage 1        writes that it waits, reads that stage 2 was first

The notes are in the store where the processes met. Only the first cause is written.
The store is used only after a failure, and in a thread, as it may not answer.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from zbpp.runtime.comm.groups import Groups
from zbpp.runtime.comm.place import Place
from zbpp.runtime.support.errors import PeerError

_LOOK_S = 0.05  # a peer breaks its connections just after it has written
_STORE_S = 2.0  # beyond that: for a store that may be gone
_POLL_S = 0.02
_MAX_ERROR_CHARS = 300  # of another process's error
_PATIENCE_S = 2.0  # for the notes of stages that see the connections break
_NOTHING_COMES_S = 0.05  # once the connections are broken
_CAUSE = "cause"

_T = TypeVar("_T")


class Waiting(NamedTuple):
    """The call in which a process has waited in vain, and the ranks it waited for."""

    call: str
    ranks: Sequence[int] = ()


def who_is_missing(
    notes: Mapping[int, Waiting], ranks: Sequence[int]
) -> tuple[str, bool]:
    """Name the rank that stopped without a note, and if no later note can change it.

    ``ranks`` are those of all processes, as the launcher counts them.

    >>> who_is_missing({0: Waiting("3", [1]), 1: Waiting("3", [2])}, [0, 1, 2])[0]
    'rank 2 has left no word: it was killed, hangs, or has left the loop'
    """
    silent = [rank for rank in range(len(ranks)) if rank not in notes]
    lost = {rank for note in notes.values() for rank in note.ranks}
    suspects = [rank for rank in silent if rank in lost] or silent
    if not suspects:
        calls = ", ".join(f"rank {ranks[i]}: {notes[i].call}" for i in sorted(notes))
        return f"all ranks wait ({calls}); all must make the same calls", True
    who = ", ".join(str(ranks[rank]) for rank in suspects)
    text = f"rank {who} has left no word: it was killed, hangs, or has left the loop"
    if len(suspects) > 1:
        text = f"ranks {who} have left no word: they were killed, hang, or have left "
        text += "the loop"
    if any(note.call == "evaluate" for note in notes.values()):
        text += "; every rank must call evaluate()"
    return text, len(silent) == 1


class Failures:
    """The waits of one process for others: their limit, and the words of a failure.

    At the first one ``groups`` are aborted, so that all others fail at once. ``call``
    tells the call that is under way, ``timeout_s`` is the longest time of a wait.
    """

    def __init__(
        self,
        groups: Groups,
        place: Place,
        *,
        call: Callable[[], str],
        timeout_s: float,
    ) -> None:
        assert place.everyone is not None
        self.timeout_s = timeout_s
        self._call = call
        self.has_failed = False
        self._groups = groups
        self._store = groups.store
        self._place = place
        self.stage = place.pipeline.index(place.rank)
        self._ranks = dist.get_process_group_ranks(place.everyone)
        self._has_written_cause = False

    @property
    def timeout(self) -> timedelta:
        """The longest time of a wait."""
        return timedelta(seconds=self.timeout_s)

    def peer_error(
        self, what: str, peer: int | None, *, is_late: bool = False
    ) -> PeerError:
        """Return the error of a message to or from a stage, or of a sum over all."""
        lost = [] if peer is None else [self._place.pipeline[peer]]
        who = "the other stages" if peer is None else f"stage {peer}"
        why = "the connection broke"
        if is_late:
            why = f"no answer in {self.timeout_s:g} s"
        return self._make_peer_error(f"{what} {who}", lost, why, is_late=is_late)

    def replica_error(self, job: str) -> PeerError:
        """Return the error of a layer's collective that has broken in a job."""
        lost = [rank for rank in self._place.peer_ranks if rank != self._place.rank]
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
            self.timeout_s = _NOTHING_COMES_S

    def report(self, error: BaseException) -> str:
        """Write down this process's error as the cause; return the first cause."""
        notes = [n for n in getattr(error, "__notes__", []) if n.startswith("in ")]
        where = notes[0] if notes else f"in {self._call()}"
        text = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")
        rank = self._ranks[self._place.rank]
        cause = f"rank {rank} failed first, {where}: {text[:_MAX_ERROR_CHARS]}"

        def write() -> str:
            first = self._store.compare_set(_CAUSE, "", cause).decode()
            self._has_written_cause = first == cause
            return str(first)

        return self._within(_STORE_S, write) or ""

    def withdraw(self) -> None:
        """Delete the cause that this process has written: it continues."""
        if self._has_written_cause:
            self._has_written_cause = False
            self._within(_STORE_S, lambda: self._store.delete_key(_CAUSE))

    def _explain(self, lost: Sequence[int], patience_s: float) -> str:
        """Write down the ranks that this process waits for; tell who failed first."""

        def look() -> str:
            note = Waiting(self._call(), lost)
            self._store.set(f"waiting/{self._place.rank}", json.dumps(note))
            start = time.monotonic()
            while True:
                text, is_certain = self._read()
                waited = time.monotonic() - start
                if waited > patience_s or (is_certain and waited > _LOOK_S):
                    return text
                time.sleep(_POLL_S)

        return self._within(patience_s + _STORE_S, look) or ""

    def _read(self) -> tuple[str, bool]:
        if self._store.check([_CAUSE]):
            return self._store.get(_CAUSE).decode(), True
        keys = {rank: f"waiting/{rank}" for rank in range(len(self._ranks))}
        notes = {
            rank: Waiting(*json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }
        return who_is_missing(notes, self._ranks)

    def _within(self, seconds: float, action: Callable[[], _T]) -> _T | None:
        """Use the store, or give up: nothing here may hide an error."""
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
