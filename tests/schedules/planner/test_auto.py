"""auto: the best placement for the costs, their links and the memory limit."""

import pytest

import zbpp.schedules.planner.auto as module
from zbpp.core import (
    Costs,
    LimitError,
    MemoryModel,
    Placement,
    RequestError,
    Schedule,
)
from zbpp.schedules import (
    plan_auto,
    plan_placement,
    plan_zb,
    plan_zbvpp,
    without_checks,
)
from zbpp.simulator import (
    bubble_rate,
    peak_memory,
    simulate,
    span,
    steady_step_time,
    work,
)

UNIT, FREE = Costs(), MemoryModel()
SINGLE, V, ROUND = (
    Placement.single(4),
    Placement.wave(4),
    Placement.interleaved(4, 2),
)


@pytest.fixture
def planned(monkeypatch) -> list[Placement]:
    """The placements that are planned, in their order."""
    found = []
    original = module._plan

    def note(placement, *rest):
        found.append(placement)
        return original(placement, *rest)

    monkeypatch.setattr(module, "_plan", note)
    return found


def auto(**request):
    return plan_auto(n_stages=4, n_microbatches=8, effort="fast", **request)


def chunk_times(heavy: tuple[int, ...]) -> tuple[float, ...]:
    """Eight chunks of which those named take more time."""
    return tuple(2.0 if chunk in heavy else 1.0 for chunk in range(8))


def test_ties_of_the_span_go_to_the_shorter_step_and_then_to_less_memory(
    planned, monkeypatch
):
    size = {"n_stages": 8, "n_microbatches": 16, "effort": "fast"}
    best = plan_auto(**size)
    assert [place.n_chunks for place in planned] == [8, 16, 16]
    figures = {
        place: figures_of(module._plan(place, 16, UNIT, FREE, "fast", limit))
        for place, limit in module.placements(8, None)
    }
    single, wave, interleaved = figures.values()
    assert (single, wave) == ((48, 55, 15), (48, 51.5, 8))
    assert interleaved[:2] == (48, 51.5) and interleaved[2] > 8
    assert best.placement == Placement.wave(8)
    turned = list(module.placements(8, None))[::-1]  # the best is not the first
    monkeypatch.setattr(module, "placements", lambda *_: turned)
    assert plan_auto(**size).placement == Placement.wave(8)


def figures_of(plan: Schedule) -> tuple[float, float, float]:
    """Span, step behind a barrier and peak memory, from the simulator."""
    timeline = simulate(plan)
    step = steady_step_time(without_checks(plan))
    return span(timeline), step, max(peak_memory(timeline, FREE))


def test_of_equal_plans_the_first_is_kept(planned, monkeypatch):
    same = [(SINGLE, 8.0), (SINGLE, 8.0)]
    monkeypatch.setattr(module, "placements", lambda *_: same)
    plans = []
    monkeypatch.setattr(
        module, "_plan", lambda *_: plans.append(auto_zb()) or plans[-1]
    )
    assert plan_auto(n_stages=4, n_microbatches=8) is plans[0]
    assert len(plans) == 2


def auto_zb() -> Schedule:
    return plan_zb(n_stages=4, n_microbatches=8, effort="fast")


def test_a_placement_whose_bound_is_above_the_best_is_skipped(planned):
    assert auto(memory=MemoryModel(limit=4)).placement == V  # no bubble in p M_B
    assert planned == [SINGLE, V]
    planned.clear()
    costs = Costs(1.0, 1.0, 1.0, 1.0)  # two chunks send twice as many messages
    assert auto(costs=costs, memory=MemoryModel(limit=4)).placement == SINGLE
    assert planned == [SINGLE]


def test_all_are_planned_where_each_could_win(planned):
    costs, memory = Costs(1.0, 1.5, 0.5, 0.2), MemoryModel(limit=3)
    best = auto(costs=costs, memory=memory)
    assert planned == [SINGLE, V, ROUND]
    sizes = {"n_microbatches": 8, "costs": costs, "memory": memory, "effort": "fast"}
    plans = [
        plan_zb(n_stages=4, **sizes),
        plan_zbvpp(n_stages=4, **sizes),
        plan_placement(placement=ROUND, **sizes),
    ]
    spans = [span(simulate(one, costs)) for one in plans]
    assert len(set(spans)) == 3
    assert best.orders == plans[spans.index(min(spans))].orders
    assert (best.name, best.memory) == ("auto", memory)


@pytest.mark.parametrize(
    ("heavy", "placement"),
    [((0, 7), ROUND), ((3, 4), ROUND), ((0, 4), V), ((3, 7), V)],
)
def test_the_placement_that_balances_the_work_is_taken(heavy, placement):
    """A V puts chunks 0 and 7 on a stage, a round 0 and 4: heavy ones should part."""
    times = chunk_times(heavy)
    assert auto(costs=Costs(times, times, times)).placement == placement


PER_STAGE = Costs(
    (1.0, 1.2, 0.9, 1.1), (1.1, 1.3, 1.0, 1.2), (0.7, 0.8, 0.6, 0.7), 0.05
)


def test_all_placements_compete_for_lists_of_one_entry_a_stage(planned):
    memory = MemoryModel(limit=2)
    best = auto(costs=PER_STAGE, memory=memory)
    assert planned == [SINGLE, V, ROUND]
    alone = plan_zb(
        n_stages=4, n_microbatches=8, effort="fast", costs=PER_STAGE, memory=memory
    )
    rates = [bubble_rate(simulate(one, PER_STAGE)) for one in (best, alone)]
    assert rates[0] < rates[1] - 0.1
    assert work(simulate(best, PER_STAGE)) == pytest.approx(
        work(simulate(alone, PER_STAGE))
    )


def test_memory_of_one_entry_a_stage_is_dealt_to_its_chunks():
    memory = MemoryModel(m_b=(2.0, 1.0, 1.0, 1.0), m_w=(1.0, 0.5, 0.5, 0.5), limit=3)
    best = auto(costs=Costs(1.0, 1.5, 0.5, 0.2), memory=memory)
    assert best.memory == memory
    assert best.placement != SINGLE
    held = memory.on(best.placement)
    for chunks, whole in zip(best.placement.chunks_of, memory.m_b, strict=True):
        assert [held.m_b[chunk] for chunk in chunks] == [whole / 2] * 2


def test_lists_say_how_many_chunks_are_meant(planned):
    auto(costs=Costs(f=(1.0, 2.0, 1.0, 1.0)), chunks_per_stage=1)
    assert set(planned) == {SINGLE}
    planned.clear()
    auto(costs=Costs(f=(1.0, 2.0, 1.0, 1.0), w=(0.5,) * 12))  # per stage, per chunk
    assert set(planned) <= {Placement.wave(4, 3), Placement.interleaved(4, 3)}
    planned.clear()
    auto(costs=Costs(1, 1, 1, 0.2, optimizer=(1.0,) * 12), memory=MemoryModel(limit=1))
    assert set(planned) == {Placement.wave(4, 3), Placement.interleaved(4, 3)}
    planned.clear()
    auto(memory=MemoryModel(limit=2), chunks_per_stage=1)
    assert planned == [SINGLE]


def test_a_list_of_no_whole_number_a_stage_is_refused():
    with pytest.raises(RequestError, match="f has 5 entries for 4 chunks"):
        auto(costs=Costs(f=(1.0,) * 5))
    with pytest.raises(RequestError, match="f has 8 entries for 12 chunks"):
        auto(costs=Costs(f=(1.0,) * 8, b=(1.0,) * 12))


def test_a_round_without_its_link_is_left_out(planned):
    costs, memory = Costs(1.0, 1.5, 0.5, (0.2,) * 3), MemoryModel(limit=3)
    auto(costs=costs, memory=memory)
    assert planned == [SINGLE, V]
    auto(costs=Costs(1.0, 1.5, 0.5, (0.2,) * 4), memory=memory)
    assert planned == [SINGLE, V, SINGLE, V, ROUND]


def test_a_limit_that_one_placement_cannot_meet_leaves_the_others():
    held = (1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 2.0)  # 3 on a stage of both
    with pytest.raises(LimitError, match="works is 3") as error:
        auto(memory=MemoryModel(m_b=held, limit=2.5))
    assert error.value.reason.startswith("auto with 4 stages and 8 micro-batches needs")
    held = (2.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0)  # 4 on stage 0 in a round, V: 3
    assert auto(memory=MemoryModel(m_b=held, limit=3)).placement == V
    held = (2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0)  # the other way about
    assert auto(memory=MemoryModel(m_b=held, limit=3)).placement == ROUND
    with pytest.raises(LimitError, match="works is 3"):
        auto(memory=MemoryModel(m_b=held, limit=2.9))
