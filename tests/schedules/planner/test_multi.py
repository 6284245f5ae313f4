"""Waves under any times and any memory: laws on random cases, optima, limits."""

import json
import math
import random
from functools import partial
from pathlib import Path

import pytest

from zbpp.core import (
    Costs,
    MemoryModel,
    Pass,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    lower_bound,
    peaks,
)
from zbpp.planning import plan
from zbpp.schedules.patterns.v_patterns import v_half_rows, v_min_rows
from zbpp.schedules.patterns.zb_v import plan_zb_v
from zbpp.schedules.planner.multi.place_weights import place_weights
from zbpp.schedules.planner.multi.plan import plan_wave
from zbpp.schedules.planner.multi.problem import PlacementProblem
from zbpp.schedules.planner.multi.timing import retime
from zbpp.simulator import bubble_rate, simulate, span

plan_zbv, plan_zbvpp = partial(plan, "ZBV"), partial(plan, "ZBVPP")
plan_v_half, plan_v_min = partial(plan, "VHalf"), partial(plan, "VMin")
DATA = Path(__file__).parents[2] / "data"


def rows(name: str) -> list[dict]:
    return json.loads((DATA / name).read_text(encoding="utf-8"))["rows"]


def checked(schedule: Schedule, memory: MemoryModel) -> Schedule:
    """Build it again with the memory: validation is independent of the planner."""
    return Schedule(
        schedule.name,
        schedule.placement,
        schedule.n_microbatches,
        schedule.orders,
        memory=memory,
    )


def random_case(rng: random.Random) -> dict:
    p, v = rng.randint(1, 7), rng.choice((1, 2, 2, 2, 3, 4))
    n = p * v

    def spread(value: float) -> tuple[float, ...]:
        return tuple(value / v * rng.uniform(0.7, 1.3) for _ in range(n))

    links = tuple(rng.choice((0.0, 0.1, 1.0)) for _ in range(p - 1))
    m_b = spread(1.0) if rng.random() < 0.5 else (1.0 / v,) * n
    share = rng.choice((0.0, 0.3, 0.5, 1.0))
    placement = Placement.wave(p, v)
    least = [sum(m_b[c] for c in chunks) for chunks in placement.chunks_of]
    return {
        "n_stages": p,
        "chunks_per_stage": v,
        "n_microbatches": rng.randint(1, 14),
        "costs": Costs(
            f=spread(1.0),
            b=spread(rng.uniform(0.5, 1.5)),
            w=spread(rng.choice((0.0, 0.5, 1.0))),
            comm=rng.choice((0.0, 0.1, 1.0, links)),
            loss=rng.choice((0.0, 0.4)),
            splits=tuple(rng.random() < 0.8 for _ in range(p)),
        ),
        "memory": MemoryModel(
            m_b=m_b,
            m_w=tuple(share * one for one in m_b),
            limit=tuple(one * rng.choice((1.0, 1.3, 2.0, p)) for one in least),
        ),
    }


def judge_random_cases(seed: int, n_cases: int, effort: str) -> None:
    rng = random.Random(seed)
    for _ in range(n_cases):
        case = random_case(rng)
        schedule = plan_wave(**case, effort=effort)
        checked(schedule, case["memory"])
        bound = lower_bound(
            schedule.placement,
            case["n_microbatches"],
            case["costs"],
            case["memory"],
        )
        assert span(simulate(schedule, case["costs"])) >= bound * (1 - 1e-9)
        for splits, order in zip(case["costs"].splits, schedule.orders, strict=True):
            kinds = {job.kind for job in order if isinstance(job, Pass)}
            assert (PassKind.BW in kinds) != splits


def test_random_cases_keep_order_and_memory():
    judge_random_cases(1, 40, "fast")
    judge_random_cases(2, 3, "default")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_cases_keep_order_and_memory():
    judge_random_cases(3, 1500, "fast")


@pytest.mark.parametrize("limit", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("n_microbatches", [1, 2, 9])
def test_the_smallest_memory_is_enough(limit, n_microbatches):
    memory = MemoryModel(limit=limit)
    schedule = plan_zbv(n_stages=4, n_microbatches=n_microbatches, memory=memory)
    assert schedule.memory == memory
    with pytest.raises(RequestError, match="smallest limit that works is 1"):
        plan_zbv(n_stages=4, n_microbatches=2, memory=MemoryModel(limit=0.9))


def test_the_same_request_gives_the_same_schedule():
    request = {
        "n_stages": 4,
        "n_microbatches": 7,
        "costs": Costs(f=1.1, b=0.9, w=0.6, comm=0.1),
        "memory": MemoryModel(limit=2.5),
    }
    assert plan_zbv(**request) == plan_zbv(**request)


def test_modes_keep_the_memory_of_their_names():
    unit = MemoryModel().on(Placement.wave(6))
    for planner, most in (
        (plan_zbv, 6),
        (plan_zbvpp, 6),
        (plan_v_half, 4),
        (plan_v_min, 3),
    ):
        schedule = planner(n_stages=6, n_microbatches=14, effort="fast")
        assert schedule.memory is None
        assert max(peaks(schedule.orders, unit)) <= most
        less = planner(
            n_stages=6, n_microbatches=14, memory=MemoryModel(limit=2), effort="fast"
        )
        assert max(peaks(less.orders, unit)) <= 2
    more = plan_v_min(
        n_stages=6, n_microbatches=14, memory=MemoryModel(limit=9), effort="fast"
    )
    assert max(peaks(more.orders, unit)) <= 3


def test_any_number_of_chunks():
    for v in (1, 2, 3, 4):
        schedule = plan_zbvpp(
            n_stages=3, n_microbatches=8, chunks_per_stage=v, effort="fast"
        )
        assert schedule.placement == Placement.wave(3, v)
        memory = MemoryModel().on(schedule.placement)
        assert max(peaks(schedule.orders, memory)) <= 3 + 1e-9


def test_more_effort_is_never_worse():
    costs = Costs(f=1.0, b=0.98, w=0.5, comm=0.03)
    request = {
        "n_stages": 4,
        "n_microbatches": 8,
        "costs": costs,
        "memory": MemoryModel(limit=2.5),
    }
    spans = [
        span(simulate(plan_zbv(**request, effort=effort), costs))
        for effort in ("fast", "default")
    ]
    assert spans[1] <= spans[0]


OPTIMA = [row for row in rows("optimum_public.json") if row["kind"] == "v"]


@pytest.mark.parametrize(
    "row", OPTIMA, ids=lambda r: f"{r['p']}x{r['m']}x{r['mem_limit']}"
)
def test_proved_optima_are_reached(row):
    """Costs and span in units of a chunk's pass."""
    costs = Costs(f=2.0, b=2.0, w=2.0)
    schedule = plan_zbv(
        n_stages=row["p"],
        n_microbatches=row["m"],
        costs=costs,
        memory=MemoryModel(limit=row["mem_limit"]),
    )
    reached = span(simulate(schedule, costs))
    assert row["obj"] - 1e-9 <= reached <= row["obj"] * 1.03


def of_peer(row: dict, effort: str = "default") -> float:
    given = row["costs"]
    costs = Costs(f=given["F"], b=given["B"], w=given["W"], comm=given["comm"])
    memory = MemoryModel(m_w=given["wfrac"], limit=row["limit"])
    schedule = plan_zbv(
        n_stages=row["p"],
        n_microbatches=row["m"],
        costs=costs,
        memory=memory,
        effort=effort,
    )
    return bubble_rate(simulate(checked(schedule, memory), costs))


PEERS = [row for row in rows("peers_public.json") if "v" in row]
SMALL = [row for row in PEERS if row["p"] * row["m"] <= 64 and row["limit"] <= row["p"]]


def name_of(row: dict) -> str:
    return f"{row['costs']['name']}-{row['p']}x{row['m']}-{row['limit']}"


@pytest.mark.parametrize("row", SMALL, ids=name_of)
def test_small_rows_of_the_peers_are_met(row):
    assert of_peer(row) <= row["v"]["bubble"] + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("row", PEERS, ids=name_of)
def test_rows_of_the_peers_are_met(row):
    assert of_peer(row) <= row["v"]["bubble"] + 1e-5


MODELS = {
    "unit": (Costs(), 0.5),
    "1.5B": (Costs(18.522, 18.086, 9.337, 0.601), 0.366412),
    "28.3B": (Costs(10.408, 10.204, 7.703, 0.408), 0.432432),
}
PATTERNS = {
    "V-Min": (v_min_rows, lambda p: (p + 4) // 3),
    "V-Half": (v_half_rows, lambda p: (p + 2) // 2),
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("p", "m"), [(4, 4), (6, 9), (7, 14), (12, 24)])
def test_published_patterns_are_met(pattern, model, p, m):
    """Under the memory of a pattern, whenever its W's are placed."""
    rows_of, limit = PATTERNS[pattern]
    costs, share = MODELS[model]
    memory = MemoryModel(m_w=share, limit=limit(p))
    problem = PlacementProblem.of(Placement.wave(p), m, costs, memory)
    lates = (0.0, 0.5, 0.75, 1.0)
    found = [
        place_weights(
            problem,
            rows_of(problem.numbers, problem.n_microbatches),
            [late] * p,
            math.inf,
        )
        for late in lates
    ]
    spans = [retime(problem, plan).span for plan in found if plan is not None]
    assert spans
    schedule = plan_zbv(
        n_stages=p, n_microbatches=m, costs=costs, memory=memory, effort="fast"
    )
    assert span(simulate(schedule, costs)) <= min(spans) * (1 + 1e-9)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 4), (6, 9), (7, 10), (16, 24)])
def test_the_hand_made_zb_v_is_met(model, p, m):
    costs, share = MODELS[model]
    memory = MemoryModel(m_w=share, limit=float(p))
    hand_made = span(simulate(plan_zb_v(n_stages=p, n_microbatches=m), costs))
    schedule = plan_zbv(
        n_stages=p, n_microbatches=m, costs=costs, memory=memory, effort="fast"
    )
    assert span(simulate(schedule, costs)) <= hand_made * (1 + 1e-9)


def test_a_span_is_finite_for_times_of_zero():
    costs = Costs(f=0.0, b=0.0, w=0.0)
    schedule = plan_zbv(n_stages=2, n_microbatches=3, costs=costs)
    assert span(simulate(schedule, costs)) == 0.0 < math.inf
