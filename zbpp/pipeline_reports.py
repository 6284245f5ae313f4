"""What a pipeline tells of its last step."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from zbpp.core import Costs, Schedule, Timeline
from zbpp.core.measured import measured_costs
from zbpp.runtime.driver import collective_calls as calls
from zbpp.runtime.executor import Executor

__all__ = ["Reports", "summarize_split"]


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


def summarize_split(where: Mapping[str, str], sizes: Mapping[str, int]) -> str:
    """One line: the share of the weights in W, and the reasons of the others.

    Args:
        where: for each parameter ``"W"`` or ``"B: "`` and the reason.
        sizes: elements of each parameter.

    >>> summarize_split({"a": "W", "b": "B: used 2 times"}, {"a": 90, "b": 10})
    'W computes the gradients of 90.0% of 100 parameters; B those of 10 (used 2 times)'
    """
    total = sum(sizes[name] for name in where)
    reasons: Counter[str] = Counter()
    for name, text in where.items():
        if text != "W":
            reasons[text.removeprefix("B: ")] += sizes[name]
    in_w = total - sum(reasons.values())
    line = (
        f"W computes the gradients of {in_w / max(1, total):.1%} of {total:,} "
        "parameters"
    )
    if reasons:
        parts = (f"{n:,} ({reason})" for reason, n in reasons.most_common())
        line += "; B those of " + ", ".join(parts)
    return line
