"""auto: the best placement for the costs, their links and the memory limit."""

import pytest

import zbpp.schedules.planner.auto as module
from zbpp.core import Costs, LimitError, MemoryModel, Placement, RequestError
from zbpp.schedules import plan_auto, plan_placement, plan_zb, plan_zbvpp
from zbpp.simulator import simulate, span

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


def test_a_plan_at_its_bound_ends_the_search(planned):
    assert auto().placement == SINGLE
    assert planned == [SINGLE]


def test_a_placement_whose_bound_is_not_below_the_best_is_skipped(planned):
    assert auto(memory=MemoryModel(limit=4)).placement == V  # no bubble in p M_B
    assert planned == [SINGLE, V]


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


def test_lists_say_how_many_chunks_are_meant(planned):
    auto(costs=Costs(f=(1.0, 2.0, 1.0, 1.0)))
    assert set(planned) == {SINGLE}
    planned.clear()
    auto(costs=Costs(1, 1, 1, 0.2, optimizer=(1.0,) * 12), memory=MemoryModel(limit=1))
    assert set(planned) == {Placement.wave(4, 3), Placement.interleaved(4, 3)}
    planned.clear()
    auto(memory=MemoryModel(limit=2), chunks_per_stage=1)
    assert planned == [SINGLE]


def test_a_list_of_no_whole_number_a_stage_is_refused():
    with pytest.raises(RequestError, match="f has 5 entries for 4 chunks"):
        auto(costs=Costs(f=(1.0,) * 5))
    with pytest.raises(RequestError, match="b has 4 entries for 8 chunks"):
        auto(costs=Costs(f=(1.0,) * 8, b=(1.0,) * 4))


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
