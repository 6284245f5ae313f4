"""All modes for one costs file: plans, figures, and what is made of them."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from zbpp.cli.summary import Steady, Summary, steady
from zbpp.core import PassKind
from zbpp.planning import BASELINE, Plan
from zbpp.planning.modes import AUTO
from zbpp.simulator import PageEntry, simulate

__all__ = ["Comparison", "Planned", "csv_text"]

_MOST_SHOWN = 4  # timelines that a page shows at first
_COLUMNS = (
    "costs",
    "mode",
    "step",
    "speed_up",
    "bubble_rate",
    "span",
    "makespan",
    "peak_memory",
    "gap",
    "reason",
)


@dataclass(frozen=True)
class Planned:
    """A mode with its plan and figures."""

    plan: Plan
    summary: Summary

    @cached_property
    def steady(self) -> Steady:
        """Times of one step among many."""
        return steady(self.plan.schedule, self.plan.costs)


@dataclass(frozen=True)
class Comparison:
    """Modes that were planned for the same costs.

    Args:
        name: of the costs; empty for those that stand if none are given.
        rows: each mode's plan, or why there is none.
        post_validation: how steps follow one another; None: validated later where the
            backward is split, else behind a barrier, as `zbpp.Pipeline` does it.
    """

    name: str
    rows: Mapping[str, Planned | str]
    post_validation: bool | None = None

    @property
    def planned(self) -> dict[str, Planned]:
        """The modes that have a plan."""
        return {
            mode: row for mode, row in self.rows.items() if not isinstance(row, str)
        }

    def step(self, mode: str) -> float:
        """Time of a step of a planned mode, one among many."""
        row = self.planned[mode]
        validated = self.post_validation
        if validated is None:
            validated = row.plan.schedule.runs(PassKind.W)
        if validated:
            return row.steady.step_time_post_validation
        return row.steady.step_time_barrier

    def data(self) -> dict[str, Any]:
        """The figures as values for JSON."""
        return {
            "costs": self.name or None,
            "modes": [self._mode_data(mode, row) for mode, row in self.rows.items()],
        }

    def _mode_data(self, mode: str, row: Planned | str) -> dict[str, Any]:
        if isinstance(row, str):
            return {"mode": mode, "reason": row}
        data = asdict(row.summary) | asdict(row.steady)
        data |= {"mode": mode, "step": self.step(mode)}
        if BASELINE in self.planned and self.step(mode) > 0:
            data["speed_up"] = self.step(BASELINE) / self.step(mode)
        return data

    def entries(self, group: str) -> list[PageEntry]:
        """The modes as entries of a page."""
        shown = self._first_shown()
        return [
            PageEntry(name=mode, group=group, reason=row)
            if isinstance(row, str)
            else PageEntry(
                name=mode,
                group=group,
                schedule=row.plan.schedule,
                simulated=simulate(row.plan.schedule, row.plan.costs),
                costs=row.plan.costs,
                step=self.step(mode),
                gap=row.summary.gap,
                shown=mode in shown,
            )
            for mode, row in self.rows.items()
        ]

    def _first_shown(self) -> list[str]:
        """The baseline, `auto`, the fastest modes; not twice the same order."""
        planned = self.planned
        shown: list[str] = []
        for mode in (BASELINE, AUTO, *sorted(planned, key=self.step)):
            if mode in planned and not any(
                planned[mode].plan.schedule.orders
                == planned[shown_mode].plan.schedule.orders
                for shown_mode in shown
            ):
                shown.append(mode)
        return shown[:_MOST_SHOWN]


def csv_text(comparisons: Sequence[Comparison]) -> str:
    """Write one row a mode; of the memory the largest of a stage."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for data in (comparison.data() for comparison in comparisons):
        for mode in data["modes"]:
            peaks = mode.get("peak_memory")
            most = {} if peaks is None else {"peak_memory": max(peaks)}
            writer.writerow({"costs": data["costs"]} | mode | most)
    return text.getvalue()
