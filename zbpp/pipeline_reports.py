"""What a pipeline tells of its last step."""

from collections.abc import Mapping
from typing import Any

from zbpp.core import Costs, Schedule, Timeline
from zbpp.measured import measured_costs
from zbpp.runtime import calls
from zbpp.runtime.executor import Executor

__all__ = ["Reports"]


class Reports:
    """Read by a script, between steps."""

    schedule: Schedule
    _executors: Mapping[int, Executor]

    def timeline(self) -> Timeline:
        """What every stage did in the last step, in seconds (every rank must call).

        Starts are comparable between processes of one machine only. On GPUs these are
        the times at which the host has issued the jobs.
        """
        return calls.gather_timeline(self._executors, self.schedule)

    def split_report(self) -> dict[str, str]:
        """For each parameter of this process that has got a gradient, where from.

        ``"W"``, or ``"B: "`` and the reason why it cannot wait; of the first step.
        """
        return calls.report_split(self._executors)

    def measured_costs(self) -> Costs:
        """Times of the passes in the last step, in ms (every rank must call).

        Raises:
            RequestError: the schedule has passes that run B and W together.
        """
        splits = calls.gather_splits(self._executors)
        return measured_costs([self.timeline()], splits=None if all(splits) else splits)

    def gather(self, thing: Any) -> list[Any]:
        """Give every process the picklable things of all, by rank."""
        return next(iter(self._executors.values())).transport.gather(thing)
