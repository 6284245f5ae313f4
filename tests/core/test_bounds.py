"""Lower bounds: below every schedule we can make, and tight where a proof says so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbpp.core import Costs, MemoryModel, Placement, RequestError
from zbpp.modes import MODES, plan
from zbpp.simulator import lower_bound, lower_bounds, peak_memory, simulate, span


@st.composite
def cases(draw):
    """A schedule with random times, and the memory that it takes as the limit."""
    schedule = plan(
        draw(st.sampled_from(sorted(MODES))),
        n_stages=draw(st.integers(1, 6)),
        n_microbatches=draw(st.integers(1, 12)),
    )
    n_chunks = schedule.placement.n_chunks
    time = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.0, 10.0))
    times = st.one_of(time, st.tuples(*[time] * n_chunks))
    p = schedule.n_stages
    edges = st.tuples(*[time] * (n_chunks - 1))
    splits = st.tuples(*[st.booleans()] * p)
    costs = Costs(
        *(draw(times), draw(times), draw(times), draw(st.one_of(time, edges))),
        loss=draw(time),
        splits=draw(st.none() | splits),
    )
    held = draw(
        st.tuples(*[st.floats(0.5, 2.0)] * n_chunks) | st.just((1.0,) * n_chunks)
    )
    share = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    memory = MemoryModel(held, tuple(share * amount for amount in held))
    peaks = peak_memory(simulate(schedule, costs), memory)
    limit = draw(st.sampled_from([None, max(peaks), tuple(peaks)]))
    return schedule, costs, MemoryModel(memory.m_b, memory.m_w, limit)


@given(cases())
def test_no_schedule_is_shorter_than_a_bound(case):
    schedule, costs, memory = case
    longest = span(simulate(schedule, costs))
    for name, bound in lower_bounds(
        schedule.placement, schedule.n_microbatches, costs, memory
    ).items():
        assert bound <= longest * (1 + 1e-9), name


@given(cases())
def test_less_memory_never_lowers_a_bound(case):
    schedule, costs, memory = case
    sizes = schedule.placement, schedule.n_microbatches, costs
    free = lower_bounds(*sizes, MemoryModel(memory.m_b, memory.m_w))
    limited = lower_bounds(*sizes, memory)
    for name, bound in free.items():
        assert limited[name] >= bound * (1 - 1e-9), name


@pytest.mark.parametrize(
    ("mode", "p", "m", "costs"),
    [
        ("ZBH1", 4, 8, Costs()),
        ("ZBH1", 8, 24, Costs(18.522, 18.086, 9.337, 0.601)),
        ("ZBH2", 4, 8, Costs()),
        ("ZBV", 4, 8, Costs()),
    ],
)
def test_some_hand_made_schedules_are_proved_optimal(mode, p, m, costs):
    schedule = plan(mode, n_stages=p, n_microbatches=m)
    timeline = simulate(schedule, costs)
    limit = max(peak_memory(timeline, MemoryModel()))
    bound = lower_bound(schedule.placement, m, costs, MemoryModel(limit=limit))
    assert bound == pytest.approx(span(timeline))


def test_a_bound_that_is_a_little_too_high_would_be_noticed():
    """Control of the two tests above: the margin between true and false is small."""
    timeline = simulate(plan("ZBH1", n_stages=4, n_microbatches=8))
    bound = lower_bound(Placement.single(4), 8, Costs(), MemoryModel(limit=4))
    assert bound == 27 == span(timeline)
    less = lower_bound(Placement.single(4), 8, Costs(), MemoryModel(limit=3))
    assert less > span(timeline)


@pytest.mark.parametrize(
    ("proof", "placement", "m", "costs", "memory", "by_hand"),
    [
        # m (F + B + W) of the slower stage.
        ("work", (0, 1), 5, Costs(w=(1, 2)), MemoryModel(), 5 * 4),
        # Down to stage 1 (1 + 1), there 5 (3 + 3), back up (1 + 1), then a W.
        ("bottleneck", (0, 1), 5, Costs((1, 3), (1, 3), 1, 1), MemoryModel(), 35),
        # From F's start to B's start 1 + c + 2 + c; one F fills it: idle 4.
        ("front and tail", (0, 1), 1, Costs(comm=1), MemoryModel(), 3 + 4),
        # Two F's fit: front idle 5 - 2. Tail: 4 until the last B, filled by one B
        # and W, or by two W's: idle 4 - 2.
        ("front and tail", (0, 1), 4, Costs(comm=1), MemoryModel(limit=2), 12 + 3 + 2),
        # Two W's of 2 each fill all of the 4, so the tail is not idle.
        ("front and tail", (0, 1), 4, Costs(w=2, comm=1), MemoryModel(limit=2), 16 + 3),
        # Two at a time, loop 6: F0 0, F2 6, F3 7, then a loop and a W.
        ("cycle", (0, 1), 4, Costs(comm=1), MemoryModel(limit=2.5), 6 + 1 + 6 + 1),
        # Two leave no room for a pending W: W0, or else F1 and B1, before F2.
        ("cycle", (0, 1), 4, Costs(comm=1), MemoryModel(limit=2), 6 + 1 + 1 + 6 + 1),
        # A large W is not waited for: F1 (1) or B1 (2) is shorter.
        ("cycle", (0,), 3, Costs(1, 2, 9), MemoryModel(limit=2), (3 + 2) + 3 + 9),
        # With one at a time it must be: every loop ends with its W.
        ("cycle", (0, 1), 3, Costs(), MemoryModel(limit=1), 2 * (4 + 1) + 4 + 1),
        # Each of 4 holds 1 for 6 and 0.5 for 1; the limit is 2.
        ("area", (0, 1), 4, Costs(comm=1), MemoryModel(limit=2), 4 * 6.5 / 2),
        # V: stage 0 holds .5 for the loop of 4 and for the inner one of 1, and W's.
        ("area", (0, 1, 1, 0), 4, Costs(), MemoryModel(limit=1), 4 * (2 + 0.5 + 0.25)),
    ],
)
def test_bounds_by_hand(proof, placement, m, costs, memory, by_hand):
    bounds = lower_bounds(Placement(placement), m, costs, memory)
    assert bounds[proof] == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("proof", "placement", "m", "costs", "memory", "by_hand"),
    [
        # Down 1 + 2, there 5 (3 + 3), back up 2 + 1, a W; the link to stage 2 is idle.
        ("bottleneck", (0, 1, 2), 5, Costs((1, 3, 0), (1, 3, 0), 1, (2, 9)), None, 37),
        # The loss is work of the last stage, and on the way of every loop.
        ("work", (0, 1), 5, Costs(loss=1), None, 5 * 4),
        ("cycle", (0, 1), 1, Costs(loss=1), None, 2 + 1 + 1 + 1 + 1),
        # Stage 0 sends 2, stage 1 sends 3: 1 + 2 + 1 + 3 + 1 + 1 + 3 + 1 + 2 + 1 + W.
        ("cycle", (0, 1, 2), 1, Costs(comm=(2, 3)), None, 17),
        # B of stage 1 brings its W along: 1 + 1 + 2 on the way, 3 B's and W's after F0.
        ("cycle", (0, 1), 1, Costs(splits=(True, False)), None, 1 + 1 + 2 + 1 + 1),
        ("cycle", (0, 1), 1, Costs(splits=(False, False)), None, 1 + 1 + 2 + 2),
        # Two in flight leave room for the next F, as nothing waits for W.
        (
            *("cycle", (0, 1), 4, Costs(comm=1, splits=(False, True))),
            *(MemoryModel(limit=2), 7 + 1 + 7),
        ),
    ],
)
def test_bounds_of_links_loss_and_splits_by_hand(
    proof, placement, m, costs, memory, by_hand
):
    bounds = lower_bounds(Placement(placement), m, costs, memory)
    assert bounds[proof] == pytest.approx(by_hand)


def test_costs_must_fit_the_placement():
    with pytest.raises(RequestError, match="b has 3 entries for 2 chunks"):
        lower_bound(Placement.single(2), 4, Costs(b=(1, 1, 1)))
