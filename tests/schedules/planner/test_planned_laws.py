"""Plans of random requests, on any placement: valid, within memory and above bounds."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpp.core import (
    Costs,
    Pass,
    PassKind,
    Placement,
    Schedule,
    ScheduleError,
    lower_bound,
    peaks,
)
from zbpp.planning import plan
from zbpp.schedules import (
    plan_one_f_one_b,
    plan_placement,
    plan_vpp,
    plan_zb_h1,
    plan_zb_h2,
)
from zbpp.simulator import simulate, span

KINDS = ("single", "single", "wave", "interleaved", "shuffled", "blocks", "uneven")


def random_placement(rng: random.Random) -> Placement:
    kind, p, v = rng.choice(KINDS), rng.randint(1, 7), rng.choice((1, 2, 2, 3))
    stage_of = list(range(p)) * v
    match kind:
        case "single":
            return Placement.single(rng.randint(1, 12))
        case "wave":
            return Placement.wave(p, v)
        case "shuffled":
            rng.shuffle(stage_of)
        case "blocks":
            stage_of.sort()
        case "uneven":
            stage_of += rng.choices(range(p), k=rng.randint(0, 4))
            rng.shuffle(stage_of)
    return Placement(tuple(stage_of))


def random_case(seed: int) -> dict:
    """Unequal stages, any limits and links, some stages that cannot split."""
    rng = random.Random(seed)
    placement = random_placement(rng)
    n, p = placement.n_chunks, placement.n_stages

    def spread(value: float) -> tuple[float, ...]:
        return tuple(value * rng.uniform(0.5, 1.5) for _ in range(n))

    edges = tuple(rng.choice((0.0, 0.1, 1.5)) for _ in range(n - 1))
    m_b, share = spread(1.0), rng.choice((0.0, 0.4, 0.98, 1.0))
    least = [sum(m_b[chunk] for chunk in chunks) for chunks in placement.chunks_of]
    return {
        "placement": placement,
        "n_microbatches": rng.randint(1, 40 if n == p else 12),
        "costs": Costs(
            f=spread(1.0),
            b=spread(rng.choice((0.6, 1.0, 2.0))),
            w=spread(rng.choice((0.0, 0.5, 1.0))),
            comm=rng.choice((0.0, 0.3, edges)),
            loss=rng.choice((0.0, 0.4)),
            splits=tuple(rng.random() < 0.8 for _ in range(p)),
            m_b=m_b,
            m_w=tuple(share * held for held in m_b),
            memory_limit=tuple(
                held * rng.choice((1.0, 1.3, 2.0, p / 2 + 1, p)) for held in least
            ),
        ),
    }


def check(case: dict, effort: str) -> float:
    """Plan, and judge the plan by itself; return its span."""
    schedule = plan_placement(**case, effort=effort)
    sizes = case["placement"], case["n_microbatches"]
    judged = Schedule("judge", *sizes, schedule.orders, case["costs"])
    longest = span(simulate(judged, case["costs"]))
    assert lower_bound(*sizes, case["costs"]) <= longest * (1 + 1e-9)
    for splits, order in zip(case["costs"].splits, judged.orders, strict=True):
        kinds = {job.kind for job in order if isinstance(job, Pass)}
        assert (PassKind.BW in kinds) != splits
    return longest


@pytest.mark.parametrize("first", range(0, 240, 60))
def test_random_requests_keep_order_memory_and_bounds(first):
    for seed in range(first, first + 60):
        check(random_case(seed), "fast")


@pytest.mark.parametrize("seed", range(8))
def test_more_effort_is_never_worse(seed):
    case = random_case(seed)
    spans = [check(case, effort) for effort in ("fast", "default", "best:0.1")]
    assert spans[1] <= spans[0] * (1 + 1e-9) and spans[2] <= spans[1] * (1 + 1e-9)


@given(
    seed=st.integers(0, 10**9),
    p=st.integers(1, 6),
    m=st.integers(1, 10),
    zero=st.sampled_from(["f", "b", "w", "none", "all"]),
    v=st.integers(1, 2),
)
def test_no_time_and_no_memory_are_planned_too(seed, p, m, zero, v):
    rng = random.Random(seed)
    times = {
        name: 0.0
        if zero in (name, "all")
        else tuple(rng.choice((0.0, 0.5, 1)) for _ in range(p * v))
        for name in "fbw"
    }
    case = {
        "placement": Placement.wave(p) if v == 2 else Placement.single(p),
        "n_microbatches": m,
        "costs": Costs(
            **times,
            comm=rng.choice((0.0, 0.3)),
            splits=(True,) * p,
            m_b=rng.choice((0.0, 1.0)),
            m_w=0.0,
            memory_limit=rng.choice((1.0, 1.9)),
        ),
    }
    assert check(case, "fast") < math.inf


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_is_never_worse_than_a_hand_made_order_that_fits(seed):
    rng = random.Random(seed)
    p, m = rng.randint(1, 8), rng.randint(1, 20)
    costs = Costs(*(tuple(rng.uniform(0.2, 2) for _ in range(p)) for _ in range(3)))
    for limit in (1, p / 2, p, 1.5 * p, 2 * p - 1):
        memory = Costs(m_w=0.4, memory_limit=max(1, limit))
        planned = plan(
            "ZB",
            n_stages=p,
            n_microbatches=m,
            costs=costs.with_memory(memory),
            effort="fast",
        )
        for other in (plan_one_f_one_b, plan_zb_h1, plan_zb_h2):
            schedule = other(n_stages=p, n_microbatches=m)
            held = max(peaks(schedule.orders, memory.on(schedule.placement)))
            if held <= memory.memory_limit:
                by_hand = span(simulate(schedule, costs))
                assert span(simulate(planned, costs)) <= by_hand * (1 + 1e-9)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 16, 2), (4, 8, 3)])
@pytest.mark.parametrize("costs", [Costs(), Costs(1.0, 1.5, 0.5, 0.2, loss=0.5)])
def test_interleaved_plans_are_shorter_than_vpp_in_the_same_memory(p, m, v, costs):
    vpp = plan_vpp(n_stages=p, n_microbatches=m, chunks_per_stage=v)
    unit = Costs().on(vpp.placement)
    memory = Costs(memory_limit=max(peaks(vpp.orders, unit)))
    planned = plan_placement(
        placement=vpp.placement,
        n_microbatches=m,
        costs=costs.with_memory(memory),
        effort="fast",
    )
    assert planned.placement == Placement.interleaved(p, v)
    assert span(simulate(planned, costs)) < span(simulate(vpp, costs))
    assert max(peaks(planned.orders, unit)) <= memory.memory_limit * (1 + 1e-9)
    with pytest.raises(ScheduleError, match="over the limit"):  # control: 1 less
        less = Costs(memory_limit=max(peaks(planned.orders, unit)) - 0.1)
        Schedule("less", planned.placement, m, planned.orders, less)


@pytest.mark.parametrize("model", ["unit", "1.5B"])
def test_more_memory_makes_no_plan_much_worse(model):
    costs = {"unit": Costs(), "1.5B": Costs(18.522, 18.086, 9.337, 0.601)}[model]
    before = math.inf
    for quarters in range(4, 81, 6):
        memory = Costs(m_b=1.0, m_w=0.366, memory_limit=quarters / 4)
        schedule = plan(
            "ZB", n_stages=8, n_microbatches=24, costs=costs.with_memory(memory)
        )
        longest = span(simulate(schedule, costs))
        assert longest <= before * 1.02, quarters
        before = longest
