"""auto: never worse than a mode that it may use, and what it looks at."""

import random
from collections.abc import Iterator

import pytest

from zbpp.core import (
    Costs,
    LimitError,
    MemoryModel,
    Placement,
    RequestError,
    Schedule,
    Step,
    parse_job,
    peaks,
)
from zbpp.planning import MODES, Plan, PlanRequest, make_plan, plan
from zbpp.schedules import without_checks
from zbpp.simulator import peak_memory, simulate, span, steady_step_time, work

GIB = 2.0**30
FREE = MemoryModel()
SINGLE, V, ROUND = (
    Placement.single(4),
    Placement.wave(4),
    Placement.interleaved(4, 2),
)
SEARCHES = {"ZB": SINGLE, "ZBV": V, "interleaved ZB": ROUND}


def auto(p: int = 4, m: int = 8, **request: object) -> Plan:
    asked = PlanRequest(
        schedule="auto", n_stages=p, n_microbatches=m, effort="fast", **request
    )
    return make_plan(asked)


def skipped(found: Plan) -> dict[str, str]:
    """Placements that were not planned, and why."""
    return {
        lost.mode: lost.reason
        for lost in found.rejected[: len(SEARCHES)]
        if lost.mode in SEARCHES and not lost.is_planned
    }


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
        "p": p,
        "m": rng.choice([p, p + 1, 2 * p, 3 * p]),
        "costs": costs,
        "memory": MemoryModel(1.0, rng.uniform(0.2, 0.9), limit),
    }


def modes_better_than_auto(
    p: int, m: int, costs: Costs, memory: MemoryModel
) -> Iterator[str]:
    """Modes with shorter steps; without a limit, of no more memory than auto may have.

    That is p M_B of a V, and 2p M_B of all others.
    """
    best = auto(p, m, costs=costs.with_memory(memory))
    for mode in set(MODES) - {"auto"}:
        try:
            other = make_plan(
                PlanRequest(
                    schedule=mode,
                    n_stages=p,
                    n_microbatches=m,
                    costs=costs.with_memory(memory),
                    effort="fast",
                )
            )
        except RequestError:  # it does not fit the limit
            continue
        most = p if other.schedule.placement == Placement.wave(p) else 2 * p
        if memory.memory_limit is None and other.peak > most:
            continue
        if other.is_better_than(best):
            yield mode


@pytest.mark.parametrize("seed", range(8))
def test_auto_is_never_worse_than_a_mode(seed):
    assert not list(modes_better_than_auto(**a_case(random.Random(seed))))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_auto_is_never_worse_than_a_mode_in_more_cases(seed):
    assert not list(modes_better_than_auto(**a_case(random.Random(1000 + seed))))


def test_an_order_of_less_memory_wins_among_equals():
    costs = Costs(f=1.0, b=1.0, w=0.9, comm=0.3)
    memory = MemoryModel(1.0, 0.3)
    assert not list(modes_better_than_auto(8, 16, costs, memory))
    found = auto(8, 16, costs=costs.with_memory(memory))
    assert found.mode not in SEARCHES, "else the case does not show it"


def test_one_placement_can_be_asked_for():
    for placement in SEARCHES.values():
        found = auto(placement=placement)
        assert found.schedule.placement == placement
        assert found.rejected


def test_ties_of_the_span_go_to_the_shorter_step_and_then_to_less_memory():
    """The table of `zbpp.schedules.planner.figures`, by the simulator."""
    figures = {}
    for name, placement in {
        "ZB": Placement.single(8),
        "ZBV": Placement.wave(8),
        "interleaved ZB": Placement.interleaved(8, 2),
    }.items():
        schedule = auto(8, 16, placement=placement).schedule
        timeline = simulate(schedule)
        step = steady_step_time(without_checks(schedule))
        figures[name] = span(timeline), step, max(peak_memory(timeline, Costs()))
    assert list(figures.values()) == [(48, 55, 15), (48, 51.5, 8), (48, 51.5, 12)]
    best = auto(8, 16)
    assert best.mode == "ZBV" and best.schedule.placement == Placement.wave(8)
    assert [str(lost) for lost in best.rejected[:2]] == [
        "ZB +6.8% (O)",
        "interleaved ZB as fast with 12",
    ]


def by_hand(text: str) -> Schedule:
    row = tuple(parse_job(cell, stage=0) for cell in text.split())
    return Schedule("by hand", Placement.single(1), 2, ((*row, Step(0)),))


def test_a_tie_in_time_goes_to_less_memory_as_it_really_is():
    """Peaks of B decide: one by one holds 1 and more inside, both at once hold 2."""
    one_by_one = by_hand("0F0 0B0 0W0 0F1 0B1 0W1")
    at_once = by_hand("0F0 0F1 0BW0 0BW1")
    for costs, best in (
        (Costs(), one_by_one),
        (Costs(peak_b=5, peak_bw=0), at_once),
        (Costs(m_w=4), one_by_one),
    ):
        first, second = (
            Plan(one, costs, "by hand")
            for one in sorted((one_by_one, at_once), key=lambda one: one is not best)
        )
        assert first.span == second.span and first.barrier_step == second.barrier_step
        assert first.is_better_than(second)
        assert not second.is_better_than(first)


def test_a_placement_whose_bound_is_above_the_best_is_skipped():
    found = auto(memory_limit=4)  # no bubble in p M_B
    assert found.schedule.placement == V
    assert skipped(found) == {
        "interleaved ZB": "its span is at least 25.5, that of ZBV is 24"
    }
    costs = Costs(1.0, 1.0, 1.0, 1.0)  # two chunks send twice as many messages
    found = auto(costs=costs, memory_limit=4)
    assert found.schedule.placement == SINGLE
    assert set(skipped(found)) == {"ZBV", "interleaved ZB"}


def test_all_are_planned_where_each_could_win():
    costs, memory = Costs(1.0, 1.5, 0.5, 0.2), MemoryModel(memory_limit=3)
    best = auto(costs=costs.with_memory(memory))
    assert not skipped(best)
    plans = [
        auto(costs=costs.with_memory(memory), placement=p) for p in SEARCHES.values()
    ]
    spans = [one.span for one in plans]
    assert len(set(spans)) == 3 and best.span == min(spans)
    assert (
        best.schedule.name == f"auto: {best.mode}"
        and best.schedule.costs == costs.with_memory(memory)
    )


def chunk_times(heavy: tuple[int, ...]) -> tuple[float, ...]:
    """Eight chunks of which those named take more time."""
    return tuple(2.0 if chunk in heavy else 1.0 for chunk in range(8))


@pytest.mark.parametrize(
    ("heavy", "placement"),
    [((0, 7), ROUND), ((3, 4), ROUND), ((0, 4), V), ((3, 7), V)],
)
def test_the_placement_that_balances_the_work_is_taken(heavy, placement):
    """A V puts chunks 0 and 7 on a stage, a round 0 and 4: heavy ones should part."""
    times = chunk_times(heavy)
    found = auto(costs=Costs(times, times, times))
    assert found.schedule.placement == placement


PER_STAGE = Costs(
    (1.0, 1.2, 0.9, 1.1), (1.1, 1.3, 1.0, 1.2), (0.7, 0.8, 0.6, 0.7), 0.05
)


def test_all_placements_compete_for_lists_of_one_entry_a_stage():
    memory = MemoryModel(memory_limit=2)
    best = auto(costs=PER_STAGE.with_memory(memory))
    assert not skipped(best)
    alone = auto(costs=PER_STAGE.with_memory(memory), placement=SINGLE)
    assert best.span < 0.9 * alone.span
    timelines = [simulate(one.schedule, PER_STAGE) for one in (best, alone)]
    assert work(timelines[0]) == pytest.approx(work(timelines[1]))


def test_lists_per_stage_of_any_memory_are_dealt_to_chunks():
    """In 4 stages of p M_B the V has no bubble; lists of 4 do not rule it out."""
    memory = MemoryModel(
        m_b=(GIB,) * 4,
        m_w=(GIB / 2,) * 4,
        m_fixed=(9 * GIB, 8 * GIB, 8 * GIB, 9 * GIB),
        peak_b=(GIB / 4,) * 4,
        memory_limit=14 * GIB,
    )
    assert auto(costs=Costs().with_memory(memory)).schedule.placement == V
    fixed = (5 * GIB, *(4 * GIB,) * 6, 5 * GIB)
    chunks = MemoryModel(m_b=GIB, m_w=GIB / 2, m_fixed=fixed, memory_limit=14 * GIB)
    assert auto(costs=Costs().with_memory(chunks)).schedule.placement.n_chunks == 8


def test_auto_holds_no_more_than_any_mode_of_the_same_times():
    """F, B, W of 1: the V without a bubble holds p M_B and the inside of one pass."""
    memory = MemoryModel(m_b=1, m_w=1.5, m_fixed=20, peak_b=1, peak_w=0.25)
    assert not list(modes_better_than_auto(4, 8, Costs(), memory))
    best = auto(costs=Costs().with_memory(memory)).schedule
    assert (
        max(peaks(best.orders, Costs().with_memory(memory).on(best.placement)))
        <= 20 + 2 * 4 + 1
    )


def test_lists_say_how_many_chunks_are_meant():
    one = Costs(f=(1.0, 2.0, 1.0, 1.0))
    assert auto(costs=one, chunks_per_stage=1).schedule.placement == SINGLE
    both = Costs(f=(1.0, 2.0, 1.0, 1.0), w=(0.5,) * 12)  # per stage, per chunk
    assert auto(costs=both).schedule.placement.n_chunks == 12
    steps = Costs(1, 1, 1, 0.2, optimizer=(1.0,) * 12)
    found = auto(costs=steps, memory_limit=1)
    assert found.schedule.placement.n_chunks == 12


def test_a_list_of_no_whole_number_a_stage_is_refused():
    with pytest.raises(RequestError, match="f has 5 entries for 4 chunks"):
        auto(costs=Costs(f=(1.0,) * 5))
    with pytest.raises(RequestError, match="f has 8 entries for 12 chunks"):
        auto(costs=Costs(f=(1.0,) * 8, b=(1.0,) * 12))


def test_a_round_without_its_link_is_left_out():
    memory = MemoryModel(memory_limit=3)
    without = auto(costs=Costs(1.0, 1.5, 0.5, (0.2,) * 3).with_memory(memory))
    assert "comm has 3 entries" in skipped(without)["interleaved ZB"]
    assert not skipped(auto(costs=Costs(1.0, 1.5, 0.5, (0.2,) * 4).with_memory(memory)))


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
    with pytest.raises(LimitError, match="works is 3"):
        auto(costs=Costs(m_b=held, memory_limit=2.9))


def test_the_short_form_gives_the_same_schedule():
    schedule = plan("auto", n_stages=4, n_microbatches=8, effort="fast")
    assert schedule == auto().schedule
