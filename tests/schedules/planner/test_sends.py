"""Sends that occupy the stage are planned for, and kept by the bounds."""

import random
from dataclasses import replace

import pytest

from zbpp.core import Costs, lower_bound
from zbpp.planning import plan
from zbpp.schedules.planner import placement as search_plan
from zbpp.simulator import simulate, span

SEEDS = range(32, 44)


def spans(seed: int) -> tuple[float, float]:
    """Of a random pipeline's plan, and of that for pure delays, both timed right."""
    rng = random.Random(seed)
    mode, p, m = rng.choice(("ZB", "ZBV")), rng.randint(2, 6), rng.randint(2, 12)
    times = [tuple(rng.choice((0.7, 1.0, 1.2)) for _ in range(p)) for _ in "fbw"]
    sends = rng.choice((0.1, 0.2, 0.4))
    costs = Costs(*times, comm=1.5 * sends, send_occupies=sends)
    memory = Costs(memory_limit=rng.choice((0.75, 1.0, 1.5)) * max(p, 2))
    found = []
    for planned in (costs, replace(costs, send_occupies=0.0)):
        schedule = plan(
            mode,
            n_stages=p,
            n_microbatches=m,
            costs=planned.with_memory(memory),
            effort="fast",
        )
        found.append(span(simulate(schedule, costs)))
        bound = lower_bound(schedule.placement, m, costs.with_memory(memory))
        assert bound <= found[-1] * (1 + 1e-9)
    return found[0], found[1]


def test_no_plan_is_longer_than_one_that_takes_sends_for_delays() -> None:
    both = [spans(seed) for seed in SEEDS]
    assert all(one <= other * (1 + 1e-12) for one, other in both)
    assert sum(one / other for one, other in both) / len(both) < 0.99


def test_the_search_alone_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: without the order for delays, some plan is longer than that order."""
    monkeypatch.setattr(search_plan, "_without_overhead", lambda *_: [])
    assert any(one > other * (1 + 1e-9) for one, other in map(spans, SEEDS))


@pytest.mark.parametrize("limit", [1.5, 2.0])
def test_no_optimum_is_below_the_bound(limit: float) -> None:
    certify = pytest.importorskip("solver").certify
    costs = Costs(comm=0.5, send_occupies=(0.25,))
    memory = Costs(memory_limit=limit)
    schedule = plan(
        "ZB",
        n_stages=2,
        n_microbatches=3,
        costs=costs.with_memory(memory),
        effort="fast",
    )
    proof = certify(schedule, costs.with_memory(memory), seconds=60, workers=1)
    bound = lower_bound(schedule.placement, 3, costs.with_memory(memory))
    assert proof.is_optimal and bound <= proof.span * (1 + 1e-9)
    # F and B of all micro-batches send, so does the stage's load
    assert bound >= 3 * 3.25
