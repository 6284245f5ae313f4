"""A GPU's streams, which run behind the host, with events as `torch.Event` has."""


class FakeStream:
    """Kernels take their time one after the other; the host goes on at once."""

    def __init__(self) -> None:
        self.now_s = 100.0
        """The time at which the stream will have done what it has been given so far."""
        self.passed_s = 0.0
        """The time that it has come to, as far as the host has waited."""
        self.n_waits = 0

    def run(self, seconds: float) -> None:
        """Launch a kernel."""
        self.now_s += seconds

    def event(self) -> "FakeEvent":
        return FakeEvent(self)

    def recorded(self) -> "FakeEvent":
        event = self.event()
        event.record()
        return event


class FakeEvent:
    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self._time_s: float | None = None

    def record(self) -> None:
        assert self._time_s is None, "recorded twice"
        self._time_s = self._stream.now_s

    def query(self) -> bool:
        assert self._time_s is not None
        return self._time_s <= self._stream.passed_s

    def synchronize(self) -> None:
        assert self._time_s is not None
        self._stream.n_waits += 1
        self._stream.passed_s = max(self._stream.passed_s, self._time_s)

    def elapsed_time(self, end_event: "FakeEvent") -> float:
        assert self.query() and end_event.query(), "torch raises here"
        assert self._time_s is not None and end_event._time_s is not None
        return (end_event._time_s - self._time_s) * 1e3
