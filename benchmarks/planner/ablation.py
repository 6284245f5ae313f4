"""The gain of each search of the planner: plans without it, case by case.

    python benchmarks/planner/ablation.py [--cases 300] [--effort default] [names ...]

The cases are the published rows, the proved optima, small V's as those of `optima.py`
and random pipelines as those of `random_cases.py`, in all of them one and two chunks a
stage. A line tells, for a search that is switched off, the mean gap to the lower bound
with and without it, the mean and the worst loss of the spans, how many plans are longer
and shorter, and the CPU seconds of all cases.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from optima import cases as small_cases
from public import KINDS, case_of, costs_of, rows
from random_cases import random_case

from zbpp.core import Costs, JobGraph, lower_bound
from zbpp.planning import plan
from zbpp.schedules.planner import placement as plans
from zbpp.schedules.planner import seeds

Case = tuple[str, int, int, Costs]
"""A mode, stages, micro-batches, costs."""


def half(table: tuple[Any, ...]) -> tuple[Any, ...]:
    """The rows that were picked first."""
    return table[: len(table) // 2]


def off(where: Any, name: str, value: Any) -> AbstractContextManager[Any]:
    """Replace a part of the planner."""
    return patch.object(where, name, value)


LINE, V = seeds.LINE_RULES, seeds.RULES
SEARCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "hand-made orders": lambda: off(seeds, "hand_made_rows", lambda problem: iter(())),
    "half of the rules": lambda: off(seeds, "RULES", half(V)),
    "half of the line rules": lambda: off(seeds, "LINE_RULES", half(LINE)),
    "early": lambda: off(
        seeds, "LINE_RULES", tuple(replace(rule, early=0) for rule in LINE)
    ),
    "is_fair": lambda: off(
        seeds, "LINE_RULES", tuple(rule for rule in LINE if not rule.is_fair)
    ),
    "max_without_b": lambda: off(
        seeds, "RULES", tuple(replace(rule, max_without_b=float("inf")) for rule in V)
    ),
    "top 3": lambda: off(
        plans, "improve_top_k", lambda problem, found, budget: found[:1]
    ),
    "travel": lambda: off(plans, "travel", lambda problem, found: found[0]),
    "hill climbing": lambda: off(
        plans, "hill_climb", lambda problem, found: [seed.plan for seed in found]
    ),
}


def cases(n_random: int) -> Iterator[Case]:
    """All cases; of the random ones and the small ones so many each."""
    for name, limit in (("peers_public", "limit"), ("optimum_public", "mem_limit")):
        for row in rows(f"{name}.json"):
            for mode, kind in KINDS.items():
                if kind in row or row.get("kind") == kind:
                    case = case_of(row, row[limit])
                    yield mode, row["p"], row["m"], costs_of(case)
    for small in itertools.islice(small_cases(), n_random):
        yield "ZBV", *small
    rng = random.Random(0)
    for _ in range(n_random):
        p, m = rng.randint(1, 12), rng.randint(1, 40)
        case = random_case(rng, p)
        yield "ZB" if len(case["f"]) == p else "ZBV", p, m, costs_of(case)
    times = Costs(10.408, 10.204, 7.703, 0.408, m_w=0.432432)
    for mode, (p, m), part in itertools.product(
        KINDS, ((16, 128), (32, 128)), (0.3, 0.5, 0.75, 0.9)
    ):
        yield mode, p, m, replace(times, memory_limit=part * p)


def spans(chosen: list[Case], effort: str) -> tuple[list[float], list[float], float]:
    """Plan all cases; return their spans, gaps and CPU seconds."""
    found, gaps, start = [], [], time.process_time()
    for mode, p, m, costs in chosen:
        ours = plan(
            mode,
            n_stages=p,
            n_microbatches=m,
            costs=costs,
            effort=effort,
        )
        times = costs.on(ours.placement)
        found.append(JobGraph(ours.orders, times).run().span)
        gaps.append(found[-1] / lower_bound(ours.placement, m, costs) - 1)
    return found, gaps, time.process_time() - start


def main() -> None:
    """Print a line for each search."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=", ".join(SEARCHES))
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--effort", default="default")
    chosen = parser.parse_args()
    listed = list(cases(chosen.cases))
    before, gaps, seconds = spans(listed, chosen.effort)
    print(f"{len(listed)} cases: mean gap {statistics.mean(gaps):.3%}, {seconds:.0f} s")
    for name in chosen.names or SEARCHES:
        with SEARCHES[name]():
            after, without, seconds = spans(listed, chosen.effort)
        losses = [one / other - 1 for one, other in zip(after, before, strict=True)]
        print(
            f"without {name:22} mean gap {statistics.mean(without):.3%}, loss "
            f"{statistics.mean(losses):.3%}, worst {max(losses):.2%}, longer "
            f"{sum(loss > 1e-9 for loss in losses)}, shorter "
            f"{sum(loss < -1e-9 for loss in losses)}, {seconds:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
