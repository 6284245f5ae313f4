"""Stop between two steps when SIGTERM or Ctrl-C asks for it, on all ranks at the same.

    rank 1, before step s    is asked; writes "s + 2" into the store of the group
    every rank               reads the store before each step, and stops before s + 2

The wish is one of this run: another one of the same processes counts one further.

A rank that is about to begin step t has seen the decision on step t - 2, for which
every other rank has ended that step. So all find before s + 2 what was there before s.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist

__all__ = ["StopRequest", "stop_requests"]

_KEY = "zbpp_stop"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """The wish to stop, and the step that all ranks stop before.

    Args:
        store: where the ranks of the run meet; None: there is one rank.
        rank: of this process.
    """

    def __init__(self, store: Any = None, rank: int = 0) -> None:
        self._store = store
        self._key = _KEY
        if store is not None:
            self._key += str(store.add(f"{_KEY}_runs_of_{rank}", 1))
        self._is_written = False
        self.number: int | None = None
        """Of the first signal that this process was sent."""

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal; a second one ends the process at once."""
        if self.number is not None and self._store is None:
            raise SystemExit(128 + number)
        self.number = self.number or number

    def stops_before(self, step: int) -> bool:
        """True if no rank is to begin this step; every rank asks before every step."""
        if self._store is None:
            return self.number is not None
        if self.number is not None and not self._is_written:
            self._is_written = True
            self._store.compare_set(self._key, "", f"{step + 2} {self.number}")
        if not self._store.check([self._key]):
            return False
        last, number = map(int, self._store.get(self._key).split())
        if step < last:
            return False
        self.number = self.number or number
        return True

    @property
    def exit_code(self) -> int:
        """0 after Ctrl-C, as all is well; 143 after SIGTERM, as is usual."""
        return 143 if self.number == signal.SIGTERM else 0


@contextmanager
def stop_requests(n_ranks: int, *, enabled: bool) -> Iterator[StopRequest | None]:
    """Handle signals meanwhile.

    Args:
        n_ranks: processes of the run.
        enabled: False leaves signals as they are, and gives None.
    """
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield None
        return
    if n_ranks > 1:
        store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
        request = StopRequest(store, dist.get_rank())
    else:
        request = StopRequest()
    before = {number: signal.signal(number, request.note) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
