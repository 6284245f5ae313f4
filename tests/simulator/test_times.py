"""Times of jobs: drawings, published figures, and the longest path as an oracle."""

import json
from itertools import pairwise, product
from pathlib import Path
from textwrap import dedent

import networkx
import pytest
from event_times import Events, period
from hypothesis import given
from hypothesis import strategies as st
from moe import moe_costs

from zbpp.core import (
    CollectiveKind,
    Costs,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    Step,
    draw,
    parse_job,
)
from zbpp.planning import MODES, plan
from zbpp.schedules import add_collectives, post_validated
from zbpp.simulator import (
    bubble_rate,
    critical_path,
    idle,
    job_graph,
    join,
    simulate,
    simulate_iterations,
    span,
    steady_step_time,
    step_time,
    with_rollback,
    work,
)

F, B, W, BW = PassKind


def hand_made(*rows, placement=None, n_microbatches=2):
    orders = tuple(
        tuple(parse_job(cell, stage=stage) for cell in row.split())
        for stage, row in enumerate(rows)
    )
    placement = placement or Placement.single(len(rows))
    return Schedule("hand-made", placement, n_microbatches, orders)


# Drawings: one cell is one unit of time.

JOINT = hand_made("0F0 0F1 0B0 0W0 0B1 0W1 O", "1F0 1BW0 1F1 1BW1 O")
BARRIER = hand_made("0F0 0F1 0B0 0W0 0B1 0W1 O", "1F0 1B0 1F1 1B1 1W0 1W1 O")
CHECKED = hand_made("0F0 0F1 V 0B0 0W0 0B1 0W1 O", "1F0 V 1B0 1F1 1B1 1W0 1W1 O")
ZBH2 = plan("ZBH2", n_stages=2, n_microbatches=3)
TWO_CHUNKS = hand_made(
    "0F0 1F0 1B0 1W0 0B0 0W0 O", placement=Placement((0, 0)), n_microbatches=1
)

ONE_STEP = {
    "a job waits for its stage, its inputs and the barrier": (
        JOINT,
        Costs(optimizer=1),
        """\
        0 | F0  F1  .   .   B0  W0  .   B1  W1  O
        1 | .   F0  BW0 -   F1  BW1 -   .   .   O""",
    ),
    "messages delay but occupy no stage": (
        JOINT,
        Costs(comm=1, optimizer=1),
        """\
        0 | F0  F1  .   .   .   .   B0  W0  .   B1  W1  O
        1 | .   .   F0  BW0 -   F1  BW1 -   .   .   .   O""",
    ),
    "the gradients of chunk 1 are summed during chunk 0, those of chunk 0 after it": (
        add_collectives(TWO_CHUNKS, shards=False),
        Costs((1, 1), (1, 1), (1, 1), optimizer=1, reduce_scatter=(1, 3)),
        """\
        0 | 0F0 1F0 1B0 1W0 0B0 0W0 .   .   O
          + .   .   .   .   R1  -   -   R0""",
    ),
}


@pytest.mark.parametrize("name", ONE_STEP)
def test_a_step_is_timed_as_drawn(name):
    schedule, costs, picture = ONE_STEP[name]
    assert draw(simulate(schedule, costs)) == dedent(picture)


ITERATIONS = {
    "behind a barrier all stages wait for the sum and start together": (
        BARRIER,
        Costs(optimizer=1, reduction=1),
        [],
        """\
        0 | F0 F1 .  B0 W0 B1 W1 .  O  F0 F1 .  B0 W0 B1 W1 .  O
        1 | .  F0 B0 F1 B1 W0 W1 .  O  .  F0 B0 F1 B1 W0 W1 .  O""",
    ),
    "post-validated, a stage steps at once and continues": (
        CHECKED,
        Costs(optimizer=1, reduction=1),
        [],
        """\
        0 | F0  F1  .   VB0 W0  B1  W1  O   F0  F1  .   VB0 W0  B1  W1  O
        1 | .   F0  VB0 F1  B1  W0  W1  O   .   F0  VB0 F1  B1  W0  W1  O""",
    ),
    "a V waits for the sum over all stages, known at 11": (
        CHECKED,
        Costs(optimizer=1, reduction=4, validation=1),
        [],
        """\
        0 | F0 F1 V  .  B0 W0 B1 W1 O  F0 F1 .  V  .  B0 W0 B1 W1 O
        1 | .  F0 V  B0 F1 B1 W0 W1 O  .  F0 .  V  B0 F1 B1 W0 W1 O""",
    ),
    "a failed V repeats the step and the passes before it": (
        CHECKED,
        Costs(optimizer=1, validation=1),
        [1],
        """\
        0 | F0 F1 V  .  B0 W0 B1 W1 O  F0 F1 V  O  F0 F1 .  B0 W0 B1 W1 O
        1 | .  F0 V  B0 F1 B1 W0 W1 O  .  F0 V  O  .  F0 B0 F1 B1 W0 W1 O""",
    ),
    "stages that end earlier start earlier": (
        post_validated(ZBH2),
        Costs(optimizer=1, validation=1),
        [],
        """\
        0 | F0 F1 F2 V  B0 W0 B1 W1 B2 W2 O  F0 F1 F2 V  B0 W0 B1 W1 B2 W2 O
        1 | .  F0 V  B0 F1 B1 F2 B2 W0 W1 W2 O  F0 V  B0 F1 B1 F2 B2 W0 W1 W2 O""",
    ),
}


@pytest.mark.parametrize("name", ITERATIONS)
def test_iterations_are_timed_as_drawn(name):
    schedule, costs, rolled_back, picture = ITERATIONS[name]
    timelines = simulate_iterations(schedule, costs, rolled_back=rolled_back)
    assert draw(join(timelines)) == dedent(picture)


def test_a_message_is_idle_time_of_its_reader():
    costs = Costs(comm=2, optimizer=1)
    timeline = simulate(JOINT, costs)
    assert (work(timeline), idle(timeline), span(timeline)) == ([6, 6], [7, 0], 13)
    assert bubble_rate(timeline) == 7 / 13
    # 0F0, 1F0 1BW0 1F1 1BW1, 0B1 0W1 O: two messages
    path = critical_path(JOINT, costs)
    assert (path.length, path.time_in_messages) == (14, 4)


def test_a_step_that_is_rolled_back_gathers_again():
    schedule = post_validated(
        add_collectives(plan("ZBV", n_stages=2, n_microbatches=4), shards=True)
    )
    costs = Costs(2, 2, 2, optimizer=1, all_gather=2, reduce_scatter=1)
    steps = simulate_iterations(schedule, costs, 2, rolled_back=[1])
    gathers = [
        [sum(s.job.kind is CollectiveKind.UNSHARD for s in lane) for lane in lanes]
        for lanes in (step.collectives for step in steps)
    ]
    assert gathers == [[2, 2], [4, 4]]
    assert [len(lane) for lane in join(steps).collectives] == [4 + 6, 4 + 6]


# Published figures.

TABLES = Path(__file__).parents[1] / "data" / "paper_tables.json"


@pytest.mark.parametrize("mode", ["1F1B", "ZBH1", "ZBH2"])
def test_published_bubble_rates_to_four_decimals(mode):
    title = mode.replace("ZB", "ZB-")
    for row in json.loads(TABLES.read_text(encoding="utf-8"))["rows"]:
        costs = Costs(row["tf"], row["tb"], row["tw"], row["tcomm"])
        schedule = plan(mode, n_stages=row["p"], n_microbatches=row["m"])
        rate = bubble_rate(simulate(schedule, costs))
        assert round(rate, 4) == row["bubble"][title], row


# The oracle.

TIME = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(1e-9, 10.0))
ALL_MODES = tuple(sorted(MODES))
SIZES = [(1, 1), (1, 5), (2, 1), (2, 4), (3, 2), (3, 7), (4, 6)]


@st.composite
def timed_schedules(draw, validation=TIME):
    """A schedule and its times: zeros, and messages longer than passes too."""
    p, m = draw(st.sampled_from(SIZES))
    schedule = plan(
        draw(st.sampled_from(ALL_MODES)), n_stages=p, n_microbatches=m, effort="fast"
    )
    reduces = draw(st.sampled_from(("none", "last", "every")))
    if reduces != "none":
        gathers = draw(st.booleans())
        schedule = add_collectives(schedule, shards=gathers, reduces=reduces)
    if draw(st.booleans()):
        schedule = post_validated(schedule)
    times = st.tuples(*[TIME] * schedule.placement.n_chunks)
    return schedule, Costs(
        draw(times),
        draw(times),
        draw(times),
        draw(TIME),
        draw(times),
        reduction=draw(st.none() | TIME),
        validation=draw(validation),
        all_gather=draw(times) if reduces != "none" else 0.0,
        reduce_scatter=draw(times) if reduces != "none" else 0.0,
    )


def near(value):
    return pytest.approx(value, rel=1e-9, abs=1e-9)


def check_starts(timeline, events):
    """Compare the start of every job with the longest path to it."""
    for beside, lines in ((False, timeline.rows), (True, timeline.collectives)):
        for stage, line in enumerate(lines):
            expected = events.starts(stage, beside=beside)
            assert [slot.job for slot in line] == [job for job, _ in expected]
            starts = [start for _, start in expected]
            assert [slot.start for slot in line] == near(starts)


@given(timed_schedules())
def test_every_job_starts_as_soon_as_its_inputs_are_ready(case):
    schedule, costs = case
    timeline, events = simulate(schedule, costs), Events(schedule, costs)
    check_starts(timeline, events)
    assert step_time(timeline) == near(events.length)
    reduction = costs.on(schedule.placement).reduction
    steps = join(simulate_iterations(schedule, costs, 3))
    check_starts(steps, Events(schedule, costs, 3, reduction=reduction))


@given(timed_schedules())
def test_the_jobs_of_the_critical_path_wait_for_one_another(case):
    schedule, costs = case
    path, timeline = critical_path(schedule, costs), simulate(schedule, costs)
    slots = {slot for line in timeline.lines for slot in line}
    assert set(path.slots) <= slots
    assert (path.slots[0].start, path.length) == (0, near(step_time(timeline)))
    hops = [0.0, *costs.on(schedule.placement).hops]
    for before, after in pairwise(path.slots):
        assert min(abs(after.start - before.end - hop) for hop in hops) < 1e-9


@given(timed_schedules())
def test_jobs_start_at_the_end_of_their_longest_path(case):
    schedule, costs = case
    check_graph(job_graph(schedule, costs))


@pytest.mark.parametrize("mode", ["ZBH1", "ZBV", "DualPipeV"])
def test_parts_start_at_the_end_of_their_longest_path(mode):
    costs = moe_costs(0.4, 2)
    graph = job_graph(plan(mode, n_stages=2, n_microbatches=6, costs=costs), costs)
    check_graph(graph)
    assert any(reason == "part" for *_, reason in graph.edges(data="reason"))


def check_graph(graph):
    """Networkx finds the starts of all jobs again, by the times of the edges."""
    longest = dict.fromkeys(graph, 0.0)
    for node in networkx.topological_sort(graph):
        for _, after, time in graph.out_edges(node, data="time"):
            longest[after] = max(longest[after], longest[node] + time)
    assert [start for _, start in graph.nodes(data="start")] == near(
        [*longest.values()]
    )


def test_a_graph_of_jobs_names_its_waits():
    schedule = plan("ZBH1", n_stages=2, n_microbatches=1)
    graph = job_graph(schedule, Costs(f=1, b=2, w=3, comm=0.5))
    jobs = {node: f"{job}@{node[0]}" for node, job in graph.nodes(data="job")}
    edges = {
        (jobs[a], jobs[b]): (edge["reason"], edge["time"])
        for a, b, edge in graph.edges(data=True)
    }
    assert edges["0F0@0", "1F0@1"] == ("value", 1.5)
    assert edges["0B0@0", "0W0@0"] == ("lane", 2.0)
    assert edges["1W0@1", "O@0"] == ("state", 3.0)
    assert len(edges) == 10


def test_the_path_of_1f1b_goes_down_up_and_along_the_first_stage():
    schedule = plan("1F1B", n_stages=2, n_microbatches=2)
    path = critical_path(schedule, Costs(f=1, b=2, w=3, comm=0.5, optimizer=4))
    names = " ".join(str(slot.job) for slot in path.slots)
    assert names == "0F0 1F0 1BW0 1F1 1BW1 0BW1 O"
    assert path.length == 4 * 0.25 + 3 * 1 + 3 * 5 + 4
    assert (path.time_of(F), path.time_of(BW), path.time_of(W)) == (3, 15, 0)
    assert path.time_in_messages == 1


# The time of a step among many.

NO_V_TIME = {"validation": st.just(0.0)}


@given(timed_schedules(**NO_V_TIME))
def test_the_steady_step_time_is_the_largest_mean_of_a_cycle(case):
    schedule, costs = case
    assert steady_step_time(schedule, costs) == near(period(schedule, costs))


def test_stages_that_drift_slowly_are_followed_to_the_end():
    """For some iterations all seem to repeat, a thousandth later each time."""
    schedule = post_validated(plan("ZBH1", n_stages=3, n_microbatches=6))
    costs = Costs((1.001, 1.0001, 1.0001), (1.001, 1.0001, 1), (1.0001, 1.1, 1.1))
    assert steady_step_time(schedule, costs) == near(period(schedule, costs))


def test_one_iteration_behind_a_barrier_equals_simulate():
    costs = Costs(3, 2, 1, 0.5, 4, reduction=0)
    assert simulate_iterations(BARRIER, costs, 1) == [simulate(BARRIER, costs)]
    without_o = [
        tuple(job for job in order if not isinstance(job, Step))
        for order in BARRIER.orders
    ]
    bare = Schedule("hand-made", BARRIER.placement, 2, tuple(without_o))
    assert simulate_iterations(bare, costs) == simulate_iterations(BARRIER, costs)


# Rollbacks.


def test_a_rollback_repeats_the_step_and_the_warm_up():
    """Where all passes take as long: O and the F's before V of stage 0."""
    for p, o in product((2, 3, 4), (0, 1, 3)):
        for mode, n_ahead in (("ZBH1", p), ("ZBH2", 2 * p - 1)):
            schedule = post_validated(plan(mode, n_stages=p, n_microbatches=2 * p))
            costs = Costs(optimizer=o)
            step, lost = with_rollback(schedule, costs)
            assert lost == near(o + n_ahead)
            assert step == steady_step_time(schedule, costs)


@pytest.mark.parametrize(
    ("schedule", "iterations"),
    [*((CHECKED, x) for x in ([0], [2], [-1], [1, 2])), (BARRIER, [1])],
)
def test_iterations_without_a_v_to_fail_are_refused(schedule, iterations):
    with pytest.raises(RequestError, match="cannot be rolled back; the schedule needs"):
        simulate_iterations(schedule, Costs(), rolled_back=iterations)


def test_rollbacks_without_a_v_are_refused():
    with pytest.raises(RequestError, match="has no V that could fail"):
        with_rollback(BARRIER)
