"""Collectives beside the jobs of a stage: by hand, by formula, and by longest path."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from longest_path import job_graph, longest_path

from zbpp.core import (
    Collective,
    CollectiveKind,
    Costs,
    Placement,
    Schedule,
    Step,
    draw,
    parse_job,
)
from zbpp.planning import plan
from zbpp.schedules import add_collectives, post_validated, without_collectives
from zbpp.simulator import (
    critical_path,
    join,
    makespan,
    simulate,
    simulate_iterations,
    steady_step_time,
    step_time,
)

UNSHARD, RESHARD, REDUCE_GRAD, REDUCE_WAIT = CollectiveKind


def at_the_end(schedule: Schedule) -> Schedule:
    """Start the sums where they are awaited: nothing runs beside them."""
    orders = []
    for order in schedule.orders:
        sums = [job for job in order if _is(job, REDUCE_GRAD)]
        rest = [job for job in order if not _is(job, REDUCE_GRAD, REDUCE_WAIT)]
        behind = [wait for one in sums for wait in (one, _wait(one))]
        cut = len(rest) - isinstance(rest[-1], Step)
        orders.append((*rest[:cut], *behind, *rest[cut:]))
    return Schedule("late", schedule.placement, schedule.n_microbatches, tuple(orders))


def _is(job, *kinds) -> bool:
    return isinstance(job, Collective) and job.kind in kinds


def _wait(job: Collective) -> Collective:
    return Collective(REDUCE_WAIT, job.chunk)


def test_two_chunks_by_hand() -> None:
    """Chunk 1 is added up in the 3 that chunk 0 still takes; chunk 0 after it."""
    row = "0F0 1F0 1B0 1W0 0B0 0W0 O"
    order = tuple(parse_job(cell, stage=0) for cell in row.split())
    schedule = Schedule("x", Placement((0, 0)), 1, (order,))
    costs = Costs((1, 1), (1, 1), (1, 1), optimizer=1, reduce_scatter=(1, 3))
    both = add_collectives(schedule, shards=False)
    timeline = simulate(both, costs)
    assert draw(timeline) == (
        "0 | 0F0 1F0 1B0 1W0 0B0 0W0 .   .   O\n  + .   .   .   .   R1  -   -   R0"
    )
    assert step_time(simulate(schedule, costs)) == 7
    assert step_time(timeline) == 9
    assert step_time(simulate(at_the_end(both), costs)) == 7 + 4


def test_a_gather_ahead_of_its_chunk_is_hidden() -> None:
    """Chunk 1 is gathered in the time of two F's; one pass ahead one of 2 shows."""
    row = "0F0 0F1 1F0 1F1 1BW0 1BW1 0BW0 0BW1 O"
    order = tuple(parse_job(cell, stage=0) for cell in row.split())
    schedule = Schedule("x", Placement((0, 0)), 2, (order,))
    costs = Costs((1, 1), (1, 1), (1, 1), all_gather=(1, 2))
    base = step_time(simulate(schedule, costs))
    exposed = {
        ahead: step_time(
            simulate(add_collectives(schedule, shards=True, ahead=ahead), costs)
        )
        - base
        for ahead in (0, 1, 2)
    }
    assert exposed == {0: 1 + 2, 1: 1 + 1, 2: 1}


@pytest.mark.parametrize("mode", ["1F1B", "ZBH1", "ZBV", "VHalf"])
@pytest.mark.parametrize("total", [0.5, 6.0])
def test_a_sum_at_the_end_adds_its_time_and_overlapped_less(mode, total) -> None:
    schedule = plan(mode, n_stages=4, n_microbatches=8)
    costs = Costs(2, 2, 2, comm=0.1, optimizer=1, reduce_scatter=total)
    alone = step_time(simulate(schedule, costs))
    both = add_collectives(schedule, shards=False)
    late = step_time(simulate(at_the_end(both), costs))
    assert late == pytest.approx(alone + total)
    found = step_time(simulate(both, costs))
    chunks = schedule.placement.n_chunks // 4
    if chunks == 1:  # all of the only chunk's sum comes after its last W
        assert found == pytest.approx(late)
    else:  # by hand: what is left of the stage when a chunk's last W has ended
        timeline = simulate(without_collectives(both), costs)
        shown = []
        for row in timeline.rows:
            last = {slot.job.chunk: slot.end for slot in row[:-1]}
            free = 0.0
            for end in sorted(last.values()):
                free = max(free, end) + total / chunks
            shown.append(free)
        expected = max(shown) - makespan(timeline)
        assert found - alone == pytest.approx(expected)
        assert found < late - 0.1


@st.composite
def cases(draw):
    schedule = plan(
        draw(st.sampled_from(["1F1B", "VPP", "ZBH1", "ZBV", "VHalf"])),
        n_stages=draw(st.integers(1, 4)),
        n_microbatches=draw(st.integers(1, 5)),
    )
    schedule = add_collectives(
        schedule,
        shards=draw(st.booleans()),
        reduces=draw(st.sampled_from(["last", "every"])),
        ahead=draw(st.integers(0, 3)),
    )
    if draw(st.booleans()):
        schedule = post_validated(schedule)
    time = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(1e-9, 10.0))
    times = st.tuples(*[time] * schedule.placement.n_chunks)
    costs = Costs(
        draw(times),
        draw(times),
        draw(times),
        draw(time),
        draw(times),
        all_gather=draw(times),
        reduce_scatter=draw(times),
    )
    return schedule, costs


SEEN: set[bool] = set()


@settings(max_examples=20)
@given(cases())
def test_the_longest_path_is_the_engines_step_time(case) -> None:
    schedule, costs = case
    path = critical_path(schedule, costs)
    timeline = simulate(schedule, costs)
    longest = longest_path(job_graph(schedule, costs))
    assert path.length == pytest.approx(longest, abs=1e-9)
    assert step_time(timeline) == pytest.approx(longest, abs=1e-9)
    places = {
        (slot.job, round(slot.start, 6))
        for row in (*timeline.rows, *timeline.collectives)
        for slot in row
    }
    assert {(slot.job, round(slot.start, 6)) for slot in path.slots} <= places
    SEEN.add(path.time_in_collectives > 0)
    for lane in timeline.collectives:  # one at a time
        ends = [slot.end for slot in lane]
        assert all(s.start >= e for s, e in zip(lane[1:], ends, strict=False))


def test_some_paths_went_through_collectives() -> None:
    assert {False, True} == SEEN


def test_a_step_that_is_rolled_back_gathers_again() -> None:
    schedule = post_validated(
        add_collectives(plan("ZBV", n_stages=2, n_microbatches=4), shards=True)
    )
    costs = Costs(2, 2, 2, optimizer=1, all_gather=2, reduce_scatter=1)
    first, second = simulate_iterations(schedule, costs, 2, rolled_back=[1])
    for lane, again in zip(first.collectives, second.collectives, strict=True):
        gathers, repeated = (
            [slot for slot in one if _is(slot.job, UNSHARD)] for one in (lane, again)
        )
        assert (len(gathers), len(repeated)) == (2, 4)
    both = join([first, second])
    assert [len(lane) for lane in both.collectives] == [4 + 6, 4 + 6]


def test_replicas_without_stages_to_wait_for_overlap_with_v() -> None:
    """Post-validated or behind a barrier, a sum counts once, at the end of a stage."""
    plain = plan("ZBH1", n_stages=2, n_microbatches=4)
    costs = Costs(reduce_scatter=0.75)
    for change in (post_validated, lambda schedule: schedule):
        with_sums = steady_step_time(
            change(add_collectives(plain, shards=False)), costs
        )
        alone = steady_step_time(change(plain), costs)
        assert with_sums == pytest.approx(alone + 0.75)
