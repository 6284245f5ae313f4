"""Parts of passes on two lanes: times, memory, files, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
from moe import C, N, moe_costs

from zbpp.core import (
    Check,
    Costs,
    Lane,
    LayerCosts,
    Part,
    Parts,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    ScheduleError,
    draw,
    ended_by,
    parse_job,
    passes_in,
    read_costs,
    read_layers,
    recomputed,
    write_costs,
)
from zbpp.planning import MODES, PlanRequest, make_plan, plan
from zbpp.schedules import (
    add_collectives,
    balance,
    lay_out,
    lower,
    plan_combined_1f1b,
    plan_dual_pipe_v,
    plan_vpp,
    post_validated,
)
from zbpp.simulator import simulate, span, steady_step_time

LANES = Costs(parts=Parts(((C, 1), (N, 1), (C, 1)), ((N, 1), (C, 2)), ((C, 1),)))
"""F: computes, exchanges, computes; B: exchanges, computes; W computes."""


def rows(*texts):
    return tuple(
        tuple(parse_job(word, stage=stage) for word in text.split())
        for stage, text in enumerate(texts)
    )


def tiny(*parts):
    """Two micro-batches on one stage: the F's overlap."""
    orders = rows("0F0 0F1 0B0 0W0 0B1 0W1 O")
    return Schedule("tiny", Placement.single(1), 2, orders, parts=rows(*parts))


TINY = "0F0.0 0F0.1~ 0F1.0 0F0.2 0F1.1~ 0B0.0~ 0F1.2 0B0.1 0W0.0 0B1.0~ 0B1.1 0W1.0 O"


def test_parts_on_different_lanes_overlap():
    assert draw(simulate(tiny(TINY), LANES)) == dedent("""\
        0 | F0 F1 F0 F1 B0 -  W0 B1 -  W1
          + .  F0 F1 B0 .  .  B1""")


@pytest.mark.parametrize("mode", sorted(set(MODES) - {"auto"}))
def test_parts_one_after_another_take_the_sum_of_their_times(mode):
    schedule = plan(mode, n_stages=3, n_microbatches=7)
    costs = moe_costs(0.3, comm=0.1, loss=0.2, optimizer=0.3)
    sums = replace(costs, parts=None)
    assert (sums.f, sums.b, sums.w) == (costs.f, costs.b, costs.w)
    assert simulate(schedule, costs) == simulate(schedule, sums)
    if schedule.n_stages < schedule.placement.n_chunks:  # the control
        laid = lay_out(schedule, costs.on(schedule.placement))
        overlapped = simulate(laid, costs)
        assert span(overlapped) < span(simulate(schedule, sums))


@pytest.mark.parametrize(
    "parts, message",
    [
        (TINY.replace(" 0W1.0", ""), "O starts where the order has 0W1"),
        (TINY.replace(" 0F0.2", ""), "0F0.2 is missing"),
        (TINY.replace("0F0.0 0F0.1~", "0F0.1~ 0F0.0"), "0F0.1~ comes where 0F0.0 must"),
        (TINY.replace("0F1.0", "0F1.0~"), "0F1.0~ comes where 0F1.0 must"),
        (TINY.replace(" O", ""), "O is missing"),
        (TINY.replace("0F0.0 0F0.1~ 0F1.0", "0F1.0 0F0.0 0F0.1~"), "the order has 0F0"),
        (TINY.replace("0W0.0", "0W0"), "0W0 comes where 0W0.0 must"),
        (TINY.replace("0F0.1~", "0F0.1"), "0F1.1~ comes where 0F1.1 must"),
        (TINY.replace("0W0.0", "0W0.0 0W0.0"), "0W0.0 comes once more"),
    ],
)
def test_rows_that_do_not_fit_the_orders_are_refused(parts, message):
    with pytest.raises(ScheduleError, match=message):
        tiny(parts)


def test_stages_that_wait_for_one_another_are_refused():
    orders = rows("0F0 0BW0 O", "1F0 1BW0 O")
    parts = rows("0F0.0 0B0.0~ 0F0.1~ 0B0.1 O", "1F0.0 1F0.1~ 1B0.0~ 1B0.1 O")
    with pytest.raises(ScheduleError, match="deadlock"):
        Schedule("wait", Placement.single(2), 1, orders, parts=parts)


TALKING = Parts(((C, 3), (N, 2), (C, 5)), ((C, 6), (N, 4), (C, 1)), ((C, 2), (C, 1)))
QUIET = Parts(((C, 7),), ((C, 8),), ((C, 9),))
LAYERS = LayerCosts(3, parts=(QUIET, TALKING, TALKING), pass_f=0.5, pass_b=0.25, m_r=0)


def test_a_chunk_has_the_parts_of_its_layers_and_w_in_one():
    costs = LAYERS.on(Placement.single(1), (3,), n_microbatches=1).on(
        Placement.single(1)
    )
    assert costs.parts == (
        Parts(
            ((C, 0.5 + 7 + 3), (N, 2), (C, 5 + 3), (N, 2), (C, 5)),
            ((C, 0.25 + 6), (N, 4), (C, 1 + 6), (N, 4), (C, 1 + 8)),
            ((C, 9 + 3 + 3),),
        ),
    )
    assert (LAYERS.f, LAYERS.b, LAYERS.w) == ((7, 10, 10), (8, 11, 11), (9, 3, 3))
    assert (costs.f, costs.b, costs.w) == ((27.5,), (30.25,), (15,))


def test_a_recomputed_forward_is_one_part_of_b():
    one = Placement.single(1)
    (again,) = LAYERS.on(one, (3,), n_microbatches=1, recompute=[0, 1]).on(one).parts
    assert again.b == ((C, 6.25), (N, 4), (C, 1 + 10 + 6), (N, 4), (C, 1 + 7 + 8))
    placement = Placement.wave(2, 2)
    order = replace(
        plan_dual_pipe_v(n_stages=2, n_microbatches=4), recompute=(True,) * 4
    )
    costs = moe_costs(0.4)
    on_chunks = recomputed(costs, order).on(placement)
    assert on_chunks.b == pytest.approx([b + 5 / 6 for b in costs.on(placement).b])
    assert [parts.b[0] for parts in on_chunks.parts] == [(C, pytest.approx(5 / 6))] * 4
    again, once = (lay_out(order, x) for x in (on_chunks, costs.on(placement)))
    longer = span(simulate(again, recomputed(costs, again)))
    assert longer > span(simulate(once, costs))


def test_no_step_is_shorter_than_the_compute_of_its_layers():
    layer = moe_costs(0.5, layers=1).parts
    layers = LayerCosts(4, parts=layer)
    sizes = {"n_stages": 1, "n_microbatches": 8}
    step = make_plan(PlanRequest(schedule="DualPipeV", costs=layers, **sizes)).step
    whole = replace(layers, parts=None)
    loads = [balance(one, Placement.wave(1, 2), 8).load for one in (layers, whole)]
    assert loads[0] == 8 * 4 * 3 <= step < loads[1]


def test_a_layers_file_keeps_parts(tmp_path):
    path = tmp_path / "layers.json"
    for layers in (LAYERS, LayerCosts(2, parts=TALKING)):
        write_costs(layers, path)
        assert read_layers(path) == layers


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_layers": 4}, "parts has 3 entries for 4 layers"),
        ({"f": [1, 2, 3]}, r"f is \(1.0, 2.0, 3.0\), but its parts sum up to \(7.0, 1"),
    ],
)  # fmt: skip
def test_wrong_parts_of_layers_are_refused(tmp_path, change, message):
    write_costs(LAYERS, tmp_path / "layers.json")
    data = json.loads((tmp_path / "layers.json").read_text())
    with pytest.raises(RequestError, match=message):
        read_layers(data | change)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"parts": 3}', "3 is no object with the keys f, b, w"),
        (
            '{"parts": {"f": [["copy", 1]], "b": []}}',
            "not a list of pairs",
        ),
        ('{"parts": {"f": [["compute", 1]], "b": []}}', "b has no part"),
        (
            '{"f": 3, "parts": {"f": [["compute", 2]], "b": [["compute", 1]]}}',
            "f is 3.*but its parts sum up to 2",
        ),
    ],
)
def test_wrong_parts_are_refused_by_name(text, message):
    with pytest.raises(RequestError, match=message):
        read_costs(json.loads(text))


def test_options_that_parts_exclude_are_refused():
    vpp = plan_vpp(n_stages=2, n_microbatches=4, chunks_per_stage=3)
    with pytest.raises(RequestError, match="4 layers of a stage do not divide"):
        moe_costs(0.4).on(vpp.placement)
    schedule = plan_dual_pipe_v(n_stages=2, n_microbatches=4)
    laid = lay_out(schedule, moe_costs(0.4).on(schedule.placement))
    with pytest.raises(RequestError, match="no place on the network"):
        add_collectives(laid, shards=True)
    with pytest.raises(
        RequestError, match="chunk 0 has parts of 2 equal layers, which"
    ):
        some = replace(laid, split=(3,) * 4, recompute=((1,),) * 4)
        recomputed(moe_costs(0.4), some)
    with pytest.raises(RequestError, match="plan again with these costs"):
        simulate(laid, moe_costs(0.4, 2))
    with pytest.raises(RequestError, match="not a list of pairs"):
        Parts(((Lane.COMPUTE, 1.0),), (("copy", 1.0),))


def test_validations_are_placed_among_parts_and_removed_again():
    schedule = plan_combined_1f1b(n_stages=2, n_microbatches=4)
    schedule = lay_out(schedule, moe_costs(0.4).on(schedule.placement))
    checked = post_validated(schedule)
    assert all(sum(str(job) == "V" for job in row) == 1 for row in checked.parts)
    assert checked.without(Check) == schedule
    assert simulate(checked, moe_costs(0.4)).n_microbatches == 4


# --- plans ----------------------------------------------------------------------------

SIZES = {"n_stages": 4, "n_microbatches": 8, "effort": "fast"}


@pytest.mark.nightly
@pytest.mark.slow
def test_the_planned_figures_of_the_docs():
    """Spans as planned, of those of passes in a row."""
    text = (Path(__file__).parents[2] / "docs/how_to/overlap.md").read_text("utf-8")
    rows = re.findall(
        r"`(\w+)`, (\d+) stages, (\d+) micro-batches(?:, limit (\d+))? "
        r"\| [\d.]+ \| ([\d.]+) \|",
        text,
    )
    assert len(rows) > 3
    for mode, p, m, limit, as_planned in rows:
        costs = moe_costs(0.4, **({"memory_limit": float(limit)} if limit else {}))
        found = plan(mode, n_stages=int(p), n_microbatches=int(m), costs=costs)
        in_a_row = replace(found, parts=None, costs=None)
        planned, alone = (span(simulate(one, costs)) for one in (found, in_a_row))
        assert f"{planned / alone:.2f}" == as_planned, (mode, p, m)


EXCHANGE = ((C, 1.0), (N, 1.0), (C, 1.0))
NOTHING_LAST = (*EXCHANGE[:2], (C, 0.0))


@pytest.mark.parametrize("mode", ["ZBH1", "ZB", "ZBV", "ZBVPP", "auto"])
@pytest.mark.parametrize(
    ("f", "w", "more"),
    [
        (EXCHANGE, (), {}),  # the backward is in one piece
        (EXCHANGE, ((C, 1.0),), {"splits": (True, False)}),
        (NOTHING_LAST, ((C, 1.0),), {}),
    ],
    ids=["no W", "a stage that cannot split", "nothing last"],
)
def test_all_forms_of_parts_are_planned_and_run(mode, f, w, more):
    costs = Costs(parts=Parts(f, EXCHANGE, w, layers=2), **more)
    asked = {"n_stages": 2, "n_microbatches": 4, "effort": "fast"}
    recompute = None if "splits" in more else "none"
    request = PlanRequest(schedule=mode, costs=costs, recompute=recompute, **asked)
    found = make_plan(request)
    assert found.lower_bound <= found.span * (1 + 1e-9)
    for schedule in (found.schedule, post_validated(found.schedule)):
        programs = lower(schedule, costs=costs, overlaps=True)
        ended = {x for program in programs for one in program for x in ended_by(one)}
        passes = (passes_in(job) for order in schedule.orders for job in order)
        assert {each for of_job in passes for each in of_job} <= ended


def test_no_plan_has_two_forwards_open_on_a_stage():
    """As the runtime cannot: random numbers are drawn by one F at a time."""
    costs = moe_costs(0.4)
    schedule = plan("ZBH2", n_stages=4, n_microbatches=8, costs=costs, effort="fast")
    assert schedule.parts is not None
    for row in schedule.parts:
        forwards = [x.of for x in row if isinstance(x, Part) and x.kind is PassKind.F]
        assert forwards == sorted(forwards, key=forwards.index)


def test_costs_with_other_parts_are_refused_not_cut_short():
    one = (C, 1.0)
    costs = Costs(parts=Parts(EXCHANGE, EXCHANGE, (one,)))
    schedule = plan("ZB", n_stages=2, n_microbatches=2, costs=costs, effort="fast")
    assert schedule.parts is not None
    for f, w in (
        (NOTHING_LAST[:2], (one,)),
        ((*EXCHANGE, (N, 0.5)), (one,)),
        (EXCHANGE, (one, one)),
        (EXCHANGE, ()),
    ):
        for call in (simulate, steady_step_time):
            with pytest.raises(
                RequestError, match=r"but the costs have .*; plan again"
            ):
                call(schedule, Costs(parts=Parts(f, EXCHANGE, w)))


def test_adjacent_compute_parts_are_joined_and_empty_ones_dropped():
    parts = Parts((*EXCHANGE, (N, 0.0)), (*EXCHANGE, (C, 0.5)), ((C, 1.0),), layers=2)
    (merged,) = Costs(parts=parts).on(Placement.single(1)).parts
    assert merged.f == ((C, 1.0), (N, 1.0), (C, 2.0), (N, 1.0), (C, 1.0))
    assert merged.b == ((C, 1.0), (N, 1.0), (C, 2.5), (N, 1.0), (C, 1.5))
    fast = Costs(parts=Parts(EXCHANGE, EXCHANGE), speed=2).on(Placement.single(1))
    assert fast.parts[0].f == ((C, 0.5), (N, 0.5), (C, 0.5))
