"""The chain of jobs that fixed the time of a timeline, simulated or measured.

From the job that ends last, back to what it waited for: the job before it on its stage
or the sender of its message, whichever was done later; an optimizer step behind a
barrier waits for the last pass of every stage.

    stage 0 | F0  F1  ..........  B0          chain: 0F0 1F0 1B0 0B0
    stage 1 |     F0  B0  F1

Of a simulated timeline this is a longest path of the graph of jobs (`critical_path`).
"""

from bisect import bisect_right

from zbpp.core import Check, Costs, Job, Pass, Step, Timeline
from zbpp.simulator.messages import Place, messages

__all__ = ["chain"]


def chain(timeline: Timeline, costs: Costs | None = None) -> list[Place]:
    """Trace the last job back to the first; ``costs`` has the delays of messages.

    Raises:
        RequestError: the costs do not fit the placement.
    """
    tracer = _Tracer(timeline, costs)
    lasts = [
        (row[-1].end, (stage, len(row) - 1))
        for stage, row in enumerate(timeline.rows)
        if row
    ]
    at = max(lasts, default=(0.0, None))[1]
    path: list[Place] = []
    while at is not None:
        path.append(at)
        at = tracer.awaited(at)
    return path[::-1]


class _Tracer:
    """Tells of each slot which other one it waited for longest."""

    def __init__(self, timeline: Timeline, costs: Costs | None) -> None:
        self._rows = timeline.rows
        self._ends = [[slot.end for slot in row] for row in timeline.rows]
        self._times = None if costs is None else costs.on(timeline.placement)
        self._sources = {one.target: one.source for one in messages(timeline)}
        self._has_checks = any(isinstance(slot.job, Check) for slot in timeline.rows[0])

    def awaited(self, at: Place) -> Place | None:
        """The slot that was done last of those that a slot waits for."""
        stage, index = at
        job = self._rows[stage][index].job
        found: list[tuple[float, Place]] = []
        if index:
            found.append((self._ends[stage][index - 1], (stage, index - 1)))
        if (source := self._sources.get(at)) is not None:
            found.append((self._arrival(source, job), source))
        if isinstance(job, Step) and not self._has_checks:
            found += self._before(self._rows[stage][index].start)
        return max(found)[1] if found else None

    def _arrival(self, source: Place, job: Job) -> float:
        sender = self._rows[source[0]][source[1]]
        if self._times is None:
            return sender.end
        assert isinstance(sender.job, Pass) and isinstance(job, Pass)
        return sender.end + self._times.delay(sender.job.chunk, job.chunk)

    def _before(self, time: float) -> list[tuple[float, Place]]:
        """Of each stage the last pass that had ended by a time."""
        found = []
        for stage, ends in enumerate(self._ends):
            index = bisect_right(ends, time) - 1
            if index >= 0 and isinstance(self._rows[stage][index].job, Pass):
                found.append((ends[index], (stage, index)))
        return found
