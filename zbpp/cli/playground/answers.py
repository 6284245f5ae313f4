"""Questions of the playground and their answers, both JSON.

A question has what it asks for (``do``), the settings of the page, and modes:

    plan   figures of one mode, and its schedule file, as ``zbpp plan`` writes it
    draw   timelines of some modes, as elements of the page
    chart  bubble rates of some modes against their memory, likewise

Settings: stages, microbatches, f, b, w and comm (times), limit (memory, 0: none),
speeds (one factor a stage, on its times).
"""

import json
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from zbpp.cli.summary import summarize
from zbpp.core import Costs, RequestError, parse_costs
from zbpp.planning import MODES, Plan, PlanRequest, make_plan
from zbpp.planning.answer import plan_text
from zbpp.simulator import PageEntry, simulate
from zbpp.simulator.page import charts_html, timelines_html

__all__ = ["MOST_JOBS", "answer", "costs_text", "overview"]

MOST_JOBS = 16_384
"""Stages times micro-batches that a page may ask for."""

Settings = Mapping[str, Any]


def overview() -> str:
    """Tell the page which modes there are."""
    return json.dumps([{"name": m.name, "about": m.summary} for m in MODES.values()])


def answer(question: str) -> str:
    """Answer one question; what cannot be had is a ``reason``.

    Raises:
        KeyError, TypeError, ValueError: it is no question of the page.
    """
    asked = json.loads(question)
    settings, modes = json.dumps(asked["settings"], sort_keys=True), asked["modes"]
    try:
        if asked["do"] in _DRAW:
            plans = {mode: _plan(settings, mode)[0] for mode in modes}
            return json.dumps({"html": _DRAW[asked["do"]](plans)})
        (mode,) = modes
        return json.dumps(_planned(settings, mode))
    except RequestError as error:
        return json.dumps({"reason": str(error)})


def costs_text(settings: Settings) -> str:
    """Write settings as the costs file that repeats them in a terminal.

    >>> one = {"f": 1, "b": 2, "w": 1, "comm": 0, "limit": 0}
    >>> costs_text(one | {"speeds": [1, 1.5]})
    '{"f": 1, "b": 2, "w": 1, "comm": 0, "speed": [1.0, 0.6666666666666666]}'
    """
    costs = {name: settings[name] for name in ("f", "b", "w", "comm")}
    costs["speed"] = [1 / factor for factor in settings["speeds"]]
    if settings["limit"]:
        costs["memory_limit"] = settings["limit"]
    return json.dumps(costs)


def _costs(settings: Settings) -> Costs:
    return parse_costs(costs_text(settings), source="the settings")


@lru_cache(maxsize=64)
def _plan(settings_text: str, mode: str) -> tuple[Plan, float]:
    """A plan, and the seconds that it took."""
    settings = json.loads(settings_text)
    p, m = int(settings["stages"]), int(settings["microbatches"])
    if p * m > MOST_JOBS:
        raise RequestError(f"{p} stages of {m} micro-batches: too many for a page")
    began = time.perf_counter()
    plan = make_plan(
        PlanRequest(schedule=mode, n_stages=p, n_microbatches=m, costs=_costs(settings))
    )
    return plan, time.perf_counter() - began


def _planned(settings: str, mode: str) -> dict[str, Any]:
    """Figures of a plan, and its file."""
    plan, seconds = _plan(settings, mode)
    figures = summarize(plan.schedule, plan.costs)
    return {
        "mode": mode,
        "chosen": plan.mode,
        "seconds": seconds,
        "bubble": figures.bubble_rate,
        "step": figures.step_time,
        "peak": max(figures.peak_memory),
        "gap": figures.gap,
        "file": plan_text(plan),
        "costs": costs_text(json.loads(settings)),
    }


def _timelines(plans: Mapping[str, Plan]) -> str:
    entries = [
        PageEntry(
            name=mode, simulated=simulate(plan.schedule, plan.costs), costs=plan.costs
        )
        for mode, plan in plans.items()
    ]
    return timelines_html(entries)


def _chart(plans: Mapping[str, Plan]) -> str:
    points = {}
    for mode, plan in plans.items():
        figures = summarize(plan.schedule, plan.costs)
        points[mode] = max(figures.peak_memory), figures.bubble_rate
    return charts_html(points, {}) if points else ""


_DRAW = {"draw": _timelines, "chart": _chart}
