"""auto: never worse than a mode that it may use, and what it looks at."""

import random

import pytest

from zbpp.core import (
    Costs,
    LimitError,
    Placement,
    RequestError,
    Schedule,
    Step,
    parse_job,
)
from zbpp.planning import MODES, Plan, PlanRequest, make_plan, plan

GIB = 2.0**30
SINGLE, V, ROUND = Placement.single(4), Placement.wave(4), Placement.interleaved(4, 2)
SEARCHES = {"ZB": SINGLE, "ZBV": V, "interleaved ZB": ROUND}


def auto(p: int = 4, m: int = 8, **request: object) -> Plan:
    asked = {"schedule": "auto", "n_stages": p, "n_microbatches": m, "effort": "fast"}
    return make_plan(PlanRequest(**asked | request))


def skipped(found: Plan) -> dict[str, str]:
    """Placements that were not planned, and why."""
    return {
        lost.mode: lost.reason
        for lost in found.rejected[: len(SEARCHES)]
        if lost.mode in SEARCHES and not lost.is_planned
    }


def case(seed: int) -> tuple[int, int, Costs]:
    rng = random.Random(seed)
    p = rng.choice([2, 3, 4, 6, 8])
    sizes = {"f": (0.5, 2.0), "b": (0.5, 2.0), "w": (0.2, 2.0)}
    n = p if rng.random() < 0.4 else 0  # one entry a stage fits every placement
    times = {
        key: tuple(rng.uniform(*size) for _ in range(n)) or rng.uniform(*size)
        for key, size in sizes.items()
    }
    limit = rng.choice([None, 0.5 * p + 1, float(p), 1.5 * p, 2.0 * p])
    comm, m_w = rng.choice([0.0, 0.1, 0.3]), rng.uniform(0.2, 0.9)
    costs = Costs(**times, comm=comm, m_w=m_w, memory_limit=limit)
    return p, rng.choice([p, p + 1, 2 * p, 3 * p]), costs


def check_no_mode_is_better(p: int, m: int, costs: Costs) -> Plan:
    """Without a limit, of no more memory than auto may have: p M_B of a V, else 2p."""
    best = auto(p, m, costs=costs)
    for mode in set(MODES) - {"auto"}:
        try:
            other = auto(p, m, costs=costs, schedule=mode)
        except RequestError:  # it does not fit the limit
            continue
        most = p if other.schedule.placement == Placement.wave(p) else 2 * p
        if costs.memory_limit is not None or other.peak <= most:
            assert not other.is_better_than(best), mode
    return best


SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(1000, 1024)]


@pytest.mark.parametrize("seed", [*range(6), *SLOW])
def test_auto_is_never_worse_than_a_mode(seed):
    check_no_mode_is_better(*case(seed))


def test_an_order_of_less_memory_wins_among_equals():
    found = check_no_mode_is_better(8, 16, Costs(1.0, 1.0, 0.9, 0.3, m_w=0.3))
    assert found.mode not in SEARCHES, "else the case does not show it"
    # F, B, W of 1: the V without a bubble holds p M_B and the inside of one pass
    costs = Costs(m_b=1, m_w=1.5, m_fixed=20, peak_b=1, peak_w=0.25)
    assert check_no_mode_is_better(4, 8, costs).peak <= 20 + 2 * 4 + 1


def test_one_placement_can_be_asked_for():
    for placement in SEARCHES.values():
        found = auto(placement=placement)
        assert found.schedule.placement == placement and found.rejected
    assert plan("auto", n_stages=4, n_microbatches=8, effort="fast") == auto().schedule


def by_hand(text: str) -> Schedule:
    row = tuple(parse_job(cell, stage=0) for cell in text.split())
    return Schedule("by hand", Placement.single(1), 2, ((*row, Step(0)),))


def test_a_tie_in_time_goes_to_the_smaller_true_memory():
    """One by one holds 1, and more inside of B; both at once hold 2."""
    one_by_one = by_hand("0F0 0B0 0W0 0F1 0B1 0W1")
    at_once = by_hand("0F0 0F1 0BW0 0BW1")
    for costs, best, other in (
        (Costs(), one_by_one, at_once),
        (Costs(m_w=4), one_by_one, at_once),
    ):
        first, second = (Plan(x, costs, "by hand") for x in (best, other))
        assert first.span == second.span and first.barrier_step == second.barrier_step
        assert first.is_better_than(second) and not second.is_better_than(first)


def test_a_placement_whose_bound_exceeds_the_best_step_is_skipped():
    found = auto(memory_limit=4)  # no bubble in p M_B
    assert found.schedule.placement == V
    reason = "+6.2% at least"
    assert skipped(found) == {"interleaved ZB": reason}
    costs = Costs(1.0, 1.0, 1.0, 1.0)  # two chunks send twice as many messages
    found = auto(costs=costs, memory_limit=4)
    assert found.schedule.placement == SINGLE
    assert set(skipped(found)) == {"ZBV", "interleaved ZB"}


def test_all_are_planned_where_each_could_win():
    costs = Costs(1.0, 1.5, 0.5, 0.2, memory_limit=3)
    best = auto(costs=costs)
    assert not skipped(best)
    spans = [auto(costs=costs, placement=p).span for p in SEARCHES.values()]
    assert len(set(spans)) == 3 and best.span == min(spans)
    assert best.schedule.name == f"auto: {best.mode}" and best.costs == costs


@pytest.mark.parametrize(
    ("heavy", "placement"),
    [((0, 7), ROUND), ((3, 4), ROUND), ((0, 4), V), ((3, 7), V)],
)
def test_the_placement_that_balances_the_work_is_taken(heavy, placement):
    """A V puts chunks 0 and 7 on a stage, a round 0 and 4: heavy ones should part."""
    times = tuple(2.0 if chunk in heavy else 1.0 for chunk in range(8))
    assert auto(costs=Costs(times, times, times)).schedule.placement == placement


def test_a_limit_that_one_placement_cannot_meet_leaves_the_others():
    held = (1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 2.0)  # 3 on a stage of both
    with pytest.raises(LimitError, match="works is 3") as error:
        auto(costs=Costs(m_b=held, memory_limit=2.5))
    assert error.value.reason.startswith("auto with 4 stages and 8 micro-batches needs")
    held = (2.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0)  # 4 on stage 0 in a round, V: 3
    found = auto(costs=Costs(m_b=held, memory_limit=3))
    assert found.schedule.placement == V
    held = (2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0)  # the other way about
    found = auto(costs=Costs(m_b=held, memory_limit=3))
    assert found.schedule.placement == ROUND
