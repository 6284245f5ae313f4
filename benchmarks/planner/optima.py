"""Compare V plans with what OR-tools proves, or finds, for the same small request.

    python benchmarks/planner/optima.py [--cases 381] [--seconds 15]

Cases: 2 to 6 stages, 3 to 8 micro-batches, limits from .375 p to 1.5 p (1 M_B and
more), unit, 1.5B, 28.3B and random times, in a fixed random order. A plan at its lower
bound is proved; else the solver starts from the plan. It needs OR-tools.
"""

import argparse
import itertools
import random
from collections.abc import Iterator

from public import MODELS
from solver import certify

from zbpp.core import Costs, JobGraph, lower_bound
from zbpp.planning import plan

PARTS = (0.375, 0.5, 0.625, 0.75, 1.0, 1.25, 1.5)
Case = tuple[int, int, Costs]
"""Stages, micro-batches, costs."""


def cases() -> Iterator[Case]:
    """Draw all; which come first is drawn too."""
    rng = random.Random(7)
    sizes = itertools.product(range(2, 7), range(3, 9), PARTS, (*MODELS, "random"))
    found: list[Case] = []
    for p, m, part, name in sizes:
        if part * p < 1:
            continue
        if name != "random":
            times, share = MODELS[name]
            found.append((p, m, Costs(**times, m_w=share, memory_limit=part * p)))
            continue
        f, b, w = (
            tuple(round(rng.uniform(0.5, 2.0), 2) for _ in range(2 * p)) for _ in "fbw"
        )
        comm, share = rng.choice((0.0, 0.1, 0.5)), rng.choice((0.25, 0.5, 0.75))
        costs = Costs(f, b, w, comm, m_w=share, memory_limit=part * p)
        found.append((p, m, costs))
    rng.shuffle(found)
    yield from found


def main() -> None:
    """Print every case that is no optimum, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=381)
    parser.add_argument("--seconds", type=float, default=15)
    chosen = parser.parse_args()
    closed: list[float] = []
    left_open: list[float] = []
    for p, m, costs in itertools.islice(cases(), chosen.cases):
        ours = plan("ZBV", n_stages=p, n_microbatches=m, costs=costs)
        span = JobGraph(ours.orders, costs.on(ours.placement)).run().span
        if span <= lower_bound(ours.placement, m, costs) * (1 + 1e-9):
            closed.append(0.0)
            continue
        found = certify(ours, costs, seconds=chosen.seconds)
        above = span / found.span - 1
        (closed if found.is_optimal else left_open).append(above)
        if above > 1e-9:
            kind = "optimum" if found.is_optimal else "a plan"
            print(
                f"{p} x {m}, limit {costs.memory_limit}: {above:.2%} above {kind}",
                flush=True,
            )
    for kind, gaps in (("closed", closed), ("left open", left_open)):
        met = sum(gap < 1e-9 for gap in gaps)
        worst = max(gaps, default=0.0)
        print(f"{kind}: {met} of {len(gaps)} not beaten, worst {worst:.2%} above")


if __name__ == "__main__":
    main()
