"""The critical path against networkx's longest path, and the engine against both."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from longest_path import job_graph, longest_path
from timed_schedules import timed_schedules

from zbpp.core import Costs, Pass, PassKind, Step, stage_of
from zbpp.planning import plan
from zbpp.schedules import post_validated
from zbpp.simulator import critical_path, makespan, simulate, step_time

F, B, W, BW = PassKind


@given(timed_schedules(), st.booleans())
def test_it_is_as_long_as_the_longest_path_and_as_the_step(case, with_v):
    schedule, costs = case
    if with_v:
        schedule = post_validated(schedule)
    timeline = simulate(schedule, costs)
    length = critical_path(schedule, costs).length
    assert length == pytest.approx(longest_path(job_graph(schedule, costs)), abs=1e-9)
    assert length == pytest.approx(step_time(timeline), abs=1e-9)
    passes = critical_path(schedule, costs, with_steps=False)
    if costs.validation == 0:
        assert passes.length == pytest.approx(makespan(timeline), abs=1e-9)


def test_the_path_of_1f1b_goes_down_up_and_along_the_first_stage():
    schedule = plan("1F1B", n_stages=2, n_microbatches=2)
    path = critical_path(schedule, Costs(f=1, b=2, w=3, comm=0.5, optimizer=4))
    assert [str(slot.job) for slot in path.slots] == [
        "0F0",
        "1F0",
        "1BW0",
        "1F1",
        "1BW1",
        "0BW1",
        "O",
    ]
    assert path.length == 4 * 0.25 + 3 * 1 + 3 * 5 + 4
    assert (path.time_of(F), path.time_of(BW), path.time_of(W)) == (3, 15, 0)
    assert path.time_in_messages == 1


@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_its_jobs_follow_one_another_but_for_the_delays_of_messages(mode):
    costs = Costs(18.522, 18.086, 9.337, 0.601, 3.3)
    slots = critical_path(plan(mode, n_stages=4, n_microbatches=6), costs).slots
    assert slots[0].start == 0
    waits = [after.start - before.end for before, after in pairwise(slots)]
    assert all(min(abs(wait), abs(wait - costs.comm)) < 1e-9 for wait in waits)


@pytest.mark.parametrize(
    ("source", "target", "w", "optimizer"),
    [
        (Pass(F, 0, 0), Pass(F, 1, 0), (1, 9), 0),
        (Pass(B, 1, 2), Pass(B, 0, 2), (9, 1), 0),
        (Pass(W, 1, 2), Step(0), (1, 9), 20),
    ],
)
def test_each_kind_of_edge_is_needed(source, target, w, optimizer):
    """Without the edges of one kind the path is too short: the law above can fail."""
    schedule = plan("ZBH1", n_stages=2, n_microbatches=3)
    graph = job_graph(schedule, Costs(w=w, comm=1, optimizer=(optimizer, 0)))
    assert graph.has_edge(source, target)
    full = longest_path(graph)
    kinds, placement = (source.kind, target.kind), schedule.placement
    graph.remove_edges_from(
        [
            (before, after)
            for before, after in graph.edges
            if (before.kind, after.kind) == kinds
            and stage_of(before, placement) != stage_of(after, placement)
        ]
    )
    assert longest_path(graph) < full
