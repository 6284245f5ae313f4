"""The gain of each search of layers: steps of random models with and without it.

    python benchmarks/planner/layer_searches.py split [--cases 120]
    python benchmarks/planner/layer_searches.py recompute [--cases 60]
    python benchmarks/planner/layer_searches.py bounds [--cases 2000]

`split` plans layers of unequal work for one, two and three chunks a stage; `recompute`
lets layers be recomputed under .3 to .75 p M_B. Each search is left out in turn. Loss:
how much longer the step is than with all. `bounds` counts how often each lower bound of
random pipelines is the highest, and what the best of the others lacks.
"""

import argparse
import math
import random
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

from public import MODELS
from random_cases import random_case

from zbpp.core import (
    Costs,
    LayerCosts,
    LimitError,
    MemoryModel,
    Placement,
    Schedule,
    lower_bounds,
)
from zbpp.schedules import plan_placement, plan_recompute
from zbpp.schedules.planner.layers import recompute, search

SEARCHES: dict[str, dict[str, list[tuple[Any, str, Any]]]] = {
    "split": {
        "room for more in flight": [(search, "_IN_FLIGHT", ())],
        "climb": [(search, "climb", lambda trials, best, *_, **__: best)],
        "splits drawn by bounds": [(search, "_drawn", lambda *_, **__: [])],
        "more than one finalist": [(search, "_FINALISTS", {"default": 0})],
    },
    "recompute": {
        "slopes along the model": [(recompute, "_slopes", lambda n: [])],
        "the first chunks alone": [(recompute, "_first_chunks", lambda n: [])],
        "climb": [(recompute, "climb", lambda trials, best, *_, **__: best)],
        "more than one finalist": [(recompute, "_FINALISTS", {"default": 1})],
        "longer moves": [(recompute, "_move_longer", lambda trials, best, _: best)],
    },
}


def planner(placement: Placement, m: int, costs: Costs, effort: str) -> Schedule:
    """Plan one placement under the limit."""
    is_single = placement.n_chunks == placement.n_stages
    return plan_placement(
        placement=placement,
        n_microbatches=m,
        costs=costs,
        effort=effort,
        default_limit=2 * placement.n_stages if is_single else math.inf,
    )


def random_layers(rng: random.Random, n: int, p: int, limit: float) -> LayerCosts:
    """Embedding, head and a layer of other work, mixtures of experts, or any."""
    times, share = rng.choice(list(MODELS.values()))
    work = [1.0] * n
    match rng.choice(("head", "middle", "experts", "any")):
        case "any":
            work = [rng.uniform(0.4, 1.6) for _ in work]
        case "experts":
            work = [1.0 + 0.8 * (i % 2) for i in range(n)]
        case "middle":
            work[n // 2] = 2.0
    work[0], work[-1] = work[0] * rng.choice((0.3, 1.0)), rng.uniform(1.5, 4)
    return LayerCosts(
        n_layers=n,
        f=tuple(times["f"] * p / n * one for one in work),
        b=tuple(times["b"] * p / n * one for one in work),
        w=tuple(times["w"] * p / n * one for one in work),
        comm=times["comm"],
        m_b=p / n,
        m_w=share * p / n,
        m_r=0.03 * p / n,
        memory_limit=max(limit * p, 1.5),
    )


def without_each(part: str, n_cases: int) -> None:
    """Plan all cases with all searches, and with each left out; print a table."""
    rng, chosen = random.Random(0), "auto" if part == "recompute" else "none"
    losses, seconds, refused = defaultdict(list), defaultdict(float), defaultdict(int)
    for _ in range(n_cases):
        p, v = rng.choice((2, 3, 4, 4, 6)), rng.choice((1, 2, 2, 3))
        n, m = rng.randint(p * v, max(p * v, 5 * p + 2)), p * rng.choice((1, 2, 3))
        shares = (0.3, 0.5, 0.75) if part == "recompute" else (0.5, 0.75, 1.0, 1.5)
        layers = random_layers(rng, n, p, rng.choice(shares))
        placement, best = Placement.wave(p, v), 0.0
        for name, changes in {"all": [], **SEARCHES[part]}.items():
            with ExitStack() as stack:
                for room, attribute, value in changes:
                    stack.enter_context(mock.patch.object(room, attribute, value))
                start = time.process_time()
                plan = partial(planner, placement, m)
                try:
                    step = plan_recompute(
                        plan, layers, placement, m, recompute=chosen
                    ).step
                except LimitError:
                    refused[name] += 1
                    continue
            seconds[name] += time.process_time() - start
            best = step if name == "all" else best
            losses[name].append(step / best - 1)
    for name, values in losses.items():
        print(
            f"{name:24} mean loss {statistics.mean(values):.2%}, worst "
            f"{max(values):.1%}, best {min(values):.1%}, refused {refused[name]}, "
            f"CPU {seconds[name] / seconds['all']:.2f}"
        )


def highest_bounds(n_cases: int) -> None:
    """Count by chunks a stage how often each bound is the highest, and what it adds."""
    rng = random.Random(0)
    counts, gains = defaultdict(int), defaultdict(list)
    for _ in range(n_cases):
        p, m = rng.randint(1, 12), rng.randint(1, 40)
        case = random_case(rng, p)
        names = ("f", "b", "w", "comm", "splits")
        rows = {k: tuple(v) if isinstance(v, list) else v for k, v in case.items()}
        costs = Costs(**{name: rows[name] for name in names}, loss=rows["loss"])
        memory = MemoryModel(1.0, rows["m_w"], rows["memory_limit"])
        v = len(case["f"]) // p
        bounds = lower_bounds(Placement.wave(p, v), m, costs.with_memory(memory))
        counts[v] += 1
        for name, bound in bounds.items():
            others = max(other for key, other in bounds.items() if key != name)
            gains[v, name].append(bound / others - 1)
    for (v, name), values in sorted(gains.items()):
        alone = [gain for gain in values if gain > 1e-9]
        n_highest = sum(gain > -1e-12 for gain in values)
        print(
            f"{v} a stage, {name:14} highest {n_highest:5}, alone "
            f"{len(alone):5} of {counts[v]}, by {statistics.mean(alone or [0]):.1%}, "
            f"at most {max(alone, default=0):.1%}"
        )


def main() -> None:
    """Run one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=["split", "recompute", "bounds"])
    parser.add_argument("--cases", type=int)
    chosen = parser.parse_args()
    if chosen.part == "bounds":
        highest_bounds(chosen.cases or 2000)
    else:
        without_each(chosen.part, chosen.cases or 60)


if __name__ == "__main__":
    main()
