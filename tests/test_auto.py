"""The mode auto is never worse than a mode that it may use."""

import random

import pytest

import zbpp.modes.auto
from zbpp.core import Costs, MemoryModel, Placement, RequestError
from zbpp.modes import MODES, plan
from zbpp.modes.auto import best_of, plan_best, plan_on
from zbpp.schedules.planner.auto import Candidate


def a_case(rng: random.Random) -> dict[str, object]:
    p = rng.choice([2, 3, 4, 6, 8])
    numbers = {
        "f": lambda: rng.uniform(0.5, 2.0),
        "b": lambda: rng.uniform(0.5, 2.0),
        "w": lambda: rng.uniform(0.2, 2.0),
    }
    listed = rng.random() < 0.4  # one entry a stage fits every placement
    costs = Costs(
        **{
            name: tuple(draw() for _ in range(p)) if listed else draw()
            for name, draw in numbers.items()
        },
        comm=rng.choice([0.0, 0.1, 0.3]),
    )
    limit = rng.choice([None, 0.5 * p + 1, float(p), 1.5 * p, 2.0 * p])
    return {
        "n_stages": p,
        "n_microbatches": rng.choice([p, p + 1, 2 * p, 3 * p]),
        "costs": costs,
        "memory": MemoryModel(1.0, rng.uniform(0.2, 0.9), limit),
        "effort": "fast",
    }


def most_that_auto_may_hold(candidate: Candidate) -> float:
    """Of modes without a limit: what each placement may have."""
    p = candidate.plan.n_stages
    return p if candidate.plan.placement == Placement.wave(p) else 2 * p


def modes_better_than_auto(request: dict[str, object]) -> list[str]:
    costs, memory = request["costs"], request["memory"]
    auto = Candidate(plan_best(**request), costs, memory)
    better = []
    for mode in set(MODES) - {"auto"}:
        try:
            other = Candidate(plan(mode, **request), costs, memory)
        except RequestError:  # it does not fit the limit
            continue
        if memory.limit is None and other.peak > most_that_auto_may_hold(other):
            continue
        if other.is_better_than(auto):
            better.append(mode)
    return better


@pytest.mark.parametrize("seed", range(8))
def test_auto_is_never_worse_than_a_mode(seed):
    assert not modes_better_than_auto(a_case(random.Random(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_auto_is_never_worse_than_a_mode_in_200_cases(seed):
    assert not modes_better_than_auto(a_case(random.Random(1000 + seed)))


HOLDS_TOO_MUCH = {
    "n_stages": 8,
    "n_microbatches": 16,
    "costs": Costs(f=1.0, b=1.0, w=0.9, comm=0.3),
    "memory": MemoryModel(1.0, 0.3),
    "effort": "fast",
}


def test_an_order_of_less_memory_wins_among_equals(monkeypatch):
    assert not modes_better_than_auto(HOLDS_TOO_MUCH)
    monkeypatch.setattr(zbpp.modes.auto, "_MODES", ())  # then the case must show it
    assert modes_better_than_auto(HOLDS_TOO_MUCH)


def test_one_placement_can_be_asked_for():
    request = {"n_stages": 4, "n_microbatches": 8, "effort": "fast"}
    for placement in (Placement.single(4), Placement.wave(4)):
        found = list(plan_on(placement, **request))
        assert len(found) > 1
        assert best_of(found).plan.placement == placement
