"""Work that can wait, done while a stage waits for another one's message.

    stage    O F F | waits for a gradient | B ...
    thread         | slice, slice, slice  |

The two never run at the same time: when the message is there, the stage waits for the
end of the slice that runs. What is left is done by `finish`, when it is needed.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext

__all__ = ["BackgroundWork"]

_POLL_S = 5e-4
_NOTHING = nullcontext()


class BackgroundWork:
    """One stage's work that can wait: slices of about a millisecond.

    Args:
        in_thread: False leaves all of it to `finish`. On a GPU it must: a thread has a
            current stream of its own, which does not wait for the stage's.
    """

    def __init__(self, *, in_thread: bool = True) -> None:
        self._in_thread = in_thread
        self._work: Iterator[bool] | None = None
        self._ends = threading.Event()
        self._pool: ThreadPoolExecutor | None = None

    def offer(self, work: Iterator[bool] | None) -> None:
        """Put work in the place of what there is.

        Args:
            work: does a slice with each item; False: it could do nothing yet.
        """
        self._work = work

    def finish(self) -> None:
        """Do what is left, now; all of it must be possible.

        Raises:
            Exception: whatever the work raises.
        """
        work, self._work = self._work, None
        for could in work or ():
            assert could, "work is finished before it can be done"

    def waiting(self) -> AbstractContextManager[None]:
        """Within this the stage only waits.

        Raises:
            Exception: whatever the work raises; there is no more work then.
        """
        work = self._work if self._in_thread else None
        return _NOTHING if work is None else self._working(work)

    @contextmanager
    def _working(self, work: Iterator[bool]) -> Iterator[None]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="zbpp-idle")
        self._ends.clear()
        run = self._pool.submit(self._run, work)
        try:
            yield
        finally:
            self._ends.set()
            if run.result():
                self._work = None

    def _run(self, work: Iterator[bool]) -> bool:
        """Work until the stage goes on; return whether nothing is left."""
        while not self._ends.is_set():
            could = next(work, None)
            if could is None:
                return True
            if not could:
                self._ends.wait(_POLL_S)
        return False
