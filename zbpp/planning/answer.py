"""The answer: a schedule, what it was made for, and why other plans lost.

A plan file is one JSON object: format and version, the figures, the plans that were
rejected, costs and memory in the keys of a costs file, and last the schedule as a
schedule file has it. Wherever a schedule file is read, a plan file is too.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from zbpp.core import (
    Costs,
    MemoryModel,
    RequestError,
    Schedule,
    lower_bound,
    parse_costs,
    parse_schedule,
    schedule_text,
)
from zbpp.core.files.costs_file import costs_data
from zbpp.core.files.json_text import (
    fail,
    integer,
    number,
    object_of,
    read,
    refuse_unknown,
)
from zbpp.schedules import LayerPlan
from zbpp.schedules.planner.figures import PlanFigures

__all__ = [
    "Plan",
    "Rejected",
    "is_plan_file",
    "is_plan_text",
    "parse_plan",
    "plan_text",
    "read_plan",
    "recomputed_of",
]

_FORMAT, _VERSION = "zbpp-plan", 1
_FIGURES = ("step", "span", "barrier_step", "peak", "lower_bound")
_KEYS = (
    "format",
    "version",
    "mode",
    "figures",
    "has_costs",
    "gathers",
    "split",
    "ideal_step",
    "even_step",
    "line",
    "rejected",
    "costs",
    "schedule",
)


@dataclass(frozen=True)
class Rejected:
    """A plan that lost, or could not be had.

    Args:
        mode: that it was made by.
        reason: that it lost for: what it takes beside the best one.
        is_planned: it was planned; else it could not be had or not be the best.
    """

    mode: str
    reason: str
    is_planned: bool = False

    def __str__(self) -> str:
        return f"{self.mode}{'' if self.is_planned else ':'} {self.reason}"


@dataclass(frozen=True)
class Plan(PlanFigures):
    """A schedule with what it was made for; its figures are attributes.

    Args:
        schedule: with the split and the recomputed layers in it, where they are known.
        costs: of the chunks, with what is recomputed.
        memory: likewise.
        mode: that the plan was made by: of auto the one that has won.
        has_costs: costs were given; else F, B and W take 1.
        split: layers of each chunk; None: they are not known.
        is_layered: costs of layers were given: steps are compared with the optimizer's
            time in them, else spans without it.
        ideal_step: with costs of layers the work of a step, shared evenly by stages.
        even_step: with costs of layers the step of even chunks by the same mode; None:
            they do not fit.
        rejected: by auto, in the order in which they were looked at.
        line: by auto with costs of layers, what was chosen and why the others lost.
    """

    schedule: Schedule
    costs: Costs
    memory: MemoryModel
    mode: str
    has_costs: bool = True
    split: tuple[int, ...] | None = None
    is_layered: bool = False
    ideal_step: float | None = None
    even_step: float | None = None
    rejected: tuple[Rejected, ...] = ()
    line: str = ""

    @classmethod
    def of_layers(cls, found: LayerPlan, mode: str) -> "Plan":
        """Take over what was planned together with a split."""
        return cls(
            found.schedule,
            found.costs,
            found.memory,
            mode,
            split=found.split,
            is_layered=True,
            ideal_step=found.ideal_step,
            even_step=found.even_step,
        )

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Figures that are compared."""
        return ("step" if self.is_layered else "span", "barrier_step", "peak")

    @property
    def known_costs(self) -> Costs | None:
        """The costs, if any were given."""
        return self.costs if self.has_costs else None

    @cached_property
    def lower_bound(self) -> float:
        """No schedule of this placement, for these costs and memory, spans less."""
        schedule = self.schedule
        return lower_bound(
            schedule.placement, schedule.n_microbatches, self.costs, self.memory
        )

    @property
    def gain(self) -> float | None:
        """Share by which the step is shorter than that of even chunks."""
        return None if not self.even_step else 1 - self.step / self.even_step

    @property
    def recompute(self) -> frozenset[int]:
        """Layers of the whole model that B computes again, where the split is known."""
        return frozenset(recomputed_of(self.schedule, self.split or ()))

    def save(self, path: str | Path) -> None:
        """Write a plan file."""
        Path(path).write_text(plan_text(self), encoding="utf-8")


def recomputed_of(schedule: Schedule, split: Sequence[int]) -> list[int]:
    """Layers of the whole model that a schedule recomputes."""
    firsts = accumulate(split, initial=0)
    return [
        first + layer
        for chunk, (first, n_layers) in enumerate(zip(firsts, split, strict=False))
        for layer in sorted(schedule.recomputes(chunk, n_layers))
    ]


def plan_text(plan: Plan) -> str:
    """Write a plan as JSON; the schedule has one line a stage."""
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "mode": plan.mode,
        "figures": {name: getattr(plan, name) for name in _FIGURES},
        "has_costs": plan.has_costs,
        "gathers": plan.costs.gathers,
        "split": plan.split,
        "ideal_step": plan.ideal_step,
        "even_step": plan.even_step,
        "line": plan.line,
        "rejected": [vars(one) for one in plan.rejected],
        "costs": costs_data(plan.costs, plan.memory),
    }
    if not plan.is_layered:
        del head["ideal_step"], head["even_step"]
    return f'{json.dumps(head)[:-1]}, "schedule":\n{schedule_text(plan.schedule)}}}\n'


def is_plan_text(text: str) -> bool:
    """True if a text is that of a plan file, which begins with its format."""
    return re.match(rf'\s*{{\s*"format"\s*:\s*"{_FORMAT}"', text) is not None


def is_plan_file(path: str) -> bool:
    """True if there is a plan file at a path."""
    if not Path(path).is_file():
        return False
    with Path(path).open("rb") as file:
        return is_plan_text(file.read(99).decode(errors="replace"))


def read_plan(path: str | Path) -> Plan:
    """Read a plan file and validate its schedule.

    Raises:
        RequestError: the file cannot be read or holds no valid plan.
    """
    return parse_plan(read(path), source=str(path))


def parse_plan(text: str, *, source: str = "plan") -> Plan:
    """Read a plan from JSON text; figures follow from what it was made for.

    Raises:
        RequestError: the text holds no valid plan; ``source`` names it.
    """
    data = object_of(text, source)
    refuse_unknown(source, data, _KEYS)
    if data.get("format") != _FORMAT or data.get("version") != _VERSION:
        fail(source, f"it is no {_FORMAT!r} of version {_VERSION}")
    for key in ("mode", "schedule", "costs"):
        if key not in data:
            fail(source, f"the key {key!r} is missing")
    costs, memory = parse_costs(json.dumps(data["costs"]), source=f"{source}: costs")
    schedule = parse_schedule(json.dumps(data["schedule"]), source=source)
    try:
        if memory.limit is not None:
            schedule = replace(schedule, memory=memory)
        costs.on(schedule.placement)
        memory.on(schedule.placement)
    except RequestError as error:
        fail(source, str(error))
    return Plan(
        schedule,
        replace(costs, gathers=data.get("gathers", False) is True),
        memory,
        _text(source, data, "mode"),
        has_costs=data.get("has_costs", True) is not False,
        split=_split(source, data.get("split")),
        is_layered="ideal_step" in data,
        ideal_step=_number(source, data, "ideal_step"),
        even_step=_number(source, data, "even_step"),
        rejected=_rejected(source, data.get("rejected", [])),
        line=_text(source, data, "line"),
    )


def _rejected(source: str, value: object) -> tuple[Rejected, ...]:
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        fail(source, "rejected is not a list of objects")
    return tuple(
        Rejected(
            mode=_text(source, row, "mode"),
            reason=_text(source, row, "reason"),
            is_planned=row.get("is_planned") is True,
        )
        for row in value
    )


def _split(source: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        fail(source, f"split is {value!r}, not a list of layers, one a chunk")
    return tuple(integer(source, f"split[{c}]", n) for c, n in enumerate(value))


def _text(source: str, data: Mapping[str, Any], key: str) -> str:
    value = data.get(key, "")
    if not isinstance(value, str):
        fail(source, f"{key} is {value!r}, not a text")
    return value


def _number(source: str, data: Mapping[str, Any], key: str) -> float | None:
    value = data.get(key)
    return None if value is None else number(source, key, value)
