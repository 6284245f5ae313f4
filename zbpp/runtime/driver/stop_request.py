"""Stop between two steps when SIGTERM or Ctrl-C asks for it, on all ranks at the same.

    rank 1, before step s    is asked; writes "s + 2" into the store of the group
    every rank               reads the store before each step, and stops before s + 2

A rank that is about to begin step t has seen the decision on step t - 2, for which
every other rank has ended that step. So all find before s + 2 what was there before s.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist

__all__ = ["StopRequest", "stop_requests"]

_KEY = "zbpp_stop"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """The wish to stop, and the step that all ranks stop before.

    Args:
        n_ranks: processes of the run.
    """

    def __init__(self, n_ranks: int) -> None:
        self._store = None
        if n_ranks > 1:
            self._store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
        self._told = False
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
        if self.number is not None and not self._told:
            self._told = True
            self._store.compare_set(_KEY, "", f"{step + 2} {self.number}")
        if not self._store.check([_KEY]):
            return False
        last, number = map(int, self._store.get(_KEY).split())
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
    request = StopRequest(n_ranks)
    before = {number: signal.signal(number, request.note) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
