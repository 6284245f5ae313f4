"""What planned modes promise: pictures, memory of their names, efforts, refusals."""

import pickle
from textwrap import dedent, indent

import pytest

import zbpp.schedules.planner.placement
from zbpp.core import (
    Costs,
    LimitError,
    Placement,
    RequestError,
    draw,
    peaks,
)
from zbpp.planning import plan
from zbpp.schedules import (
    plan_placement,
    plan_zb_h1,
    plan_zb_h2,
)
from zbpp.simulator import simulate, span

PICTURES = {
    1: """\
        0 | F0 .  .  B0 W0 F1 .  .  B1 W1 F2 .  .  B2 W2 F3 .  .  B3 W3
        1 | .  F0 B0 W0 .  .  F1 B1 W1 .  .  F2 B2 W2 .  .  F3 B3 W3""",
    2: """\
        0 | F0 F1 .  B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
        1 | .  F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3""",
    3: """\
        0 | F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3
        1 | .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3""",
}


@pytest.mark.parametrize("limit", PICTURES)
def test_a_plan_is_what_is_drawn_on_top_of_the_file(limit):
    schedule = plan("ZB", n_stages=2, n_microbatches=4, memory_limit=limit)
    assert draw(simulate(schedule)) == dedent(PICTURES[limit])
    first, rest = dedent(PICTURES[limit]).split("\n")
    picture = f"limit {limit}  {first}\n         {rest}"
    assert indent(picture, "    ") in zbpp.schedules.planner.placement.__doc__


@pytest.mark.parametrize("limit", [1.0, 1.5, 2.0])
def test_a_v_is_what_is_drawn_on_top_of_its_file(limit):
    costs, memory = Costs(f=2.0, b=2.0, w=2.0), Costs(memory_limit=limit)
    schedule = plan(
        "ZBV", n_stages=2, n_microbatches=3, costs=costs.with_memory(memory)
    )
    text = zbpp.schedules.planner.placement.__doc__
    lines = [line.strip() for line in text.splitlines()]
    at = lines.index(f"limit {limit:g}")
    drawn = draw(simulate(schedule, costs)).splitlines()
    for row, line in zip(drawn, lines[at + 1 : at + 3], strict=True):
        assert row.startswith(line.removesuffix("...").rstrip())


def test_modes_of_one_chunk_promise_a_memory_and_plan_for_the_times():
    times = Costs(1.0, 1.2, 0.4, 0.1)
    for mode, promise, pattern in (
        ("ZBH1", 4, plan_zb_h1),
        ("ZBH2", 7, plan_zb_h2),
    ):
        schedule = plan(mode, n_stages=4, n_microbatches=12, costs=times)
        held = peaks(schedule.orders, Costs().on(schedule.placement))
        assert max(held) <= promise and schedule.costs is None
        by_hand = pattern(n_stages=4, n_microbatches=12)
        assert span(simulate(schedule, times)) <= span(simulate(by_hand, times))
        low = plan(mode, n_stages=4, n_microbatches=12, memory_limit=2)
        assert max(peaks(low.orders, Costs().on(low.placement))) <= 2
        high = plan(mode, n_stages=4, n_microbatches=12, memory_limit=99)
        assert max(peaks(high.orders, Costs().on(high.placement))) <= promise
    free = plan("ZB", n_stages=4, n_microbatches=12, costs=times)
    assert max(peaks(free.orders, Costs().on(free.placement))) <= 8


def test_waves_keep_the_memory_of_their_names():
    unit = Costs().on(Placement.wave(6))
    size = {"n_stages": 6, "n_microbatches": 14, "effort": "fast"}
    for mode, most in (
        ("ZBV", 6),
        ("ZBVPP", 6),
        ("VHalf", 4),
        ("VMin", 3),
    ):
        schedule = plan(mode, **size)
        assert schedule.costs is None
        assert max(peaks(schedule.orders, unit)) <= most
        less = plan(mode, **size, memory_limit=2)
        assert max(peaks(less.orders, unit)) <= 2
    more = plan("VMin", **size, memory_limit=9)
    assert max(peaks(more.orders, unit)) <= 3


def test_any_number_of_chunks():
    for v in (1, 2, 3, 4):
        schedule = plan(
            "ZBVPP", n_stages=3, n_microbatches=8, chunks_per_stage=v, effort="fast"
        )
        assert schedule.placement == Placement.wave(3, v)
        memory = Costs().on(schedule.placement)
        assert max(peaks(schedule.orders, memory)) <= 3 + 1e-9


@pytest.mark.parametrize("limit", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("n_microbatches", [1, 2, 9])
def test_the_smallest_memory_is_enough(limit, n_microbatches):
    memory = Costs(memory_limit=limit)
    schedule = plan("ZBV", n_stages=4, n_microbatches=n_microbatches, costs=memory)
    assert schedule.costs == memory
    with pytest.raises(RequestError, match="smallest limit that works is 1"):
        plan("ZBV", n_stages=4, n_microbatches=2, memory_limit=0.9)


def test_a_limit_that_holds_no_microbatch_names_the_smallest_that_does():
    memory = Costs(m_b=(1.0, 2.0), m_w=0.5, memory_limit=1.5)
    with pytest.raises(
        RequestError, match=r"stage 1, over the limit 1\.5; .* works is 2"
    ):
        plan("ZB", n_stages=2, n_microbatches=3, costs=memory)
    request = {
        "placement": Placement((0, 1, 0)),
        "n_microbatches": 2,
        "costs": Costs(m_b=(1.0, 1.0, 2.0), m_w=0.5, memory_limit=2.5),
    }
    with pytest.raises(
        LimitError, match=r"memory 3 on stage 0, over the limit 2\.5; the smal"
    ) as error:
        plan_placement(**request)
    assert error.value.smallest == 3
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    memory = Costs(m_b=(1.0, 1.0, 2.0), m_w=0.5, memory_limit=3)
    request["costs"] = memory
    assert plan_placement(**request).costs == memory


@pytest.mark.parametrize(
    "effort", ["", "worst", "fast:3", "best:", "best:-1", "best:nan"]
)
def test_an_unknown_effort_is_refused(effort):
    with pytest.raises(RequestError, match="choose fast, default, best"):
        plan("ZB", n_stages=2, n_microbatches=4, effort=effort, costs=Costs(w=0.3))
