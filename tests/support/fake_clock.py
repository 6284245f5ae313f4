"""A clock that the test moves: what waits for a time ends at once, and exactly."""

__all__ = ["FakeClock"]

TICK_S = 2.0**-20


class FakeClock:
    """Stands in for the module `time`, where a file imports it whole.

    Reading takes a tick, so that a loop that waits for a time comes to its end.
    """

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        """Seconds."""
        self.now += TICK_S
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let time go by."""
        self.now += seconds
