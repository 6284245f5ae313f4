"""The life of a pipeline: no step after a failure, none left unvalidated."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from zbpp.runtime.driver.state_access import AccessHooks
from zbpp.runtime.executor import Executor
from zbpp.runtime.support.errors import torn_step

__all__ = ["Lifecycle"]


class Lifecycle:
    """The calls that a pipeline may still take.

    Args:
        executors: of this process.
    """

    def __init__(self, executors: Iterable[Executor]) -> None:
        self._executors = tuple(executors)
        self._running = False
        self._ended: str | None = None
        self.hooks: AccessHooks | None = None
        """Removed by `close`."""

    @property
    def has_ended(self) -> bool:
        """No call is taken any more: it is closed, or a step has failed."""
        return self._ended is not None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Refuse to go on after a failure: messages and gradients are half done."""
        if self._ended is not None:
            raise RuntimeError(f"{self._ended}; build a new Pipeline")
        self._running = True
        try:
            yield
        except BaseException as error:
            self._ended = f"an earlier step failed ({type(error).__name__}: {error})"
            raise
        finally:
            self._running = False

    def synchronize(self) -> None:
        """Settle the last step on every stage of this process.

        Raises:
            RuntimeError: it is called from within a step, say by a signal handler.
        """
        if self._running:
            raise RuntimeError(
                "parameters and optimizer state are asked for in the middle of a step; "
                "note the wish (a signal handler sets a flag) and ask between steps"
            )
        if self._ended is not None:
            self._check_whole()
        for executor in self._executors:
            executor.settle()

    def _check_whole(self) -> None:
        """Refuse a state in which a torn step counts on one stage and on another not.

        Raises:
            RuntimeError: there is such a step.
        """
        if len({executor.optimizer.counts for executor in self._executors}) > 1:
            raise torn_step(self._executors[0].stage.step)

    def close(self) -> None:
        """Settle the last step, finish the messages, give back all that is held."""
        if self._ended is not None:
            return
        self.synchronize()
        if self.hooks is not None:
            self.hooks.remove()
        self._ended = "the pipeline is closed"
        for executor in self._executors:
            executor.transport.flush()
            executor.transport.close()

    def let_go(self) -> None:
        """The pipeline was dropped without `close`: wait for nobody.

        Python may call this at any time, in any thread.
        """
        if self._ended is not None:
            return
        self._ended = "the pipeline was dropped"
        for executor in self._executors:
            executor.transport.let_go()
