"""Planning from Python: what is unambiguous is converted, the rest is refused."""

import json
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import zbpp
from zbpp import simulator
from zbpp.core import LayerCosts, Parts
from zbpp.emulation.layers import EmulatedLayer
from zbpp.planning import PlanRequest

SIZES = {"n_stages": 4, "n_microbatches": 8}
MODES = ("1F1B", "ZBH1", "ZBV", "auto")


@pytest.mark.parametrize("mode", MODES)
def test_numbers_lists_and_arrays_plan_as_tuples_do(mode):
    times, limits = (1.0, 1.5, 1.0, 2.0), (4.0, 4.5, 5.0, 6.0)
    plain = zbpp.plan(mode, costs=zbpp.Costs(f=times, memory_limit=limits), **SIZES)
    numpy_sizes = {name: np.int64(size) for name, size in SIZES.items()}
    for costs, sizes in (
        (zbpp.Costs(f=list(times), memory_limit=list(limits)), SIZES),
        (zbpp.Costs(f=np.array(times), memory_limit=np.array(limits)), numpy_sizes),
        (zbpp.Costs(f=torch.tensor(times).numpy(), memory_limit=limits), SIZES),
        (zbpp.Costs(f=[np.float32(x) for x in times], memory_limit=limits), SIZES),
    ):
        assert costs == zbpp.Costs(f=times, memory_limit=limits)
        assert zbpp.plan(mode, costs=costs, **sizes) == plain
    mean = zbpp.Costs(f=np.mean(times))
    assert zbpp.plan(mode, costs=mean, **SIZES).orders == (
        zbpp.plan(mode, costs=zbpp.Costs(f=1.375), **SIZES).orders
    )


def test_costs_are_a_table_a_dict_or_a_file_of_chunks_or_layers(tmp_path):
    data = {"f": [1, 1, 1, 2], "memory_limit": 3}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(data))
    plans = [
        zbpp.plan("ZB", costs=costs, **SIZES)
        for costs in (zbpp.Costs(**data), data, path, str(path))
    ]
    assert all(plan == plans[0] for plan in plans)
    layers = {"n_layers": 8, "f": np.arange(1.0, 9.0), "m_b": "1GiB", "m_w": "1GiB"}
    table = LayerCosts(**layers)
    assert table.m_b == 2**30 and table.f == tuple(range(1, 9))
    path.write_text(json.dumps(layers | {"f": table.f}))
    splits = {zbpp.plan("1F1B", costs=x, **SIZES).split for x in (table, layers, path)}
    assert len(splits) == 1 and sum(splits.pop()) == 8


@pytest.mark.parametrize("limit", [3, np.float64(3.0), "3", [3] * 4, np.full(4, 3.0)])
def test_one_name_for_the_limit(limit):
    by_costs = zbpp.plan("ZB", costs=zbpp.Costs(memory_limit=limit), **SIZES)
    by_name = zbpp.plan("ZB", memory_limit=limit, **SIZES)
    assert by_name.orders == by_costs.orders
    assert by_name.orders != zbpp.plan("ZB", **SIZES).orders  # the limit counts


def test_a_limit_replaces_that_of_layers():
    layers = LayerCosts(n_layers=8, memory_limit=100.0)
    free, low = (
        zbpp.make_plan(
            PlanRequest(schedule="ZB", costs=layers, memory_limit=x, **SIZES)
        )
        for x in (None, 6.0)
    )
    assert low.peak <= 6.0 < free.peak


def test_lanes_of_parts_may_be_words():
    f, b = [("compute", 1), ("network", 1)], [["compute", np.int64(1)]]
    words = zbpp.Costs(parts=[Parts(f, b, [("compute", 1)])] * 4)
    plan = zbpp.make_plan(PlanRequest(schedule="ZBV", n_stages=2, n_microbatches=4,
                                      costs=words, effort="fast"))  # fmt: skip
    assert words.f == (2, 2, 2, 2) and plan.schedule.parts is not None


def costs(**columns):
    return lambda: zbpp.Costs(**columns)


def planned(**more):
    return lambda: zbpp.plan(
        **{"mode": "ZBH1", "n_stages": 2, "n_microbatches": 2, **more}
    )


def recomputed(what):
    return lambda: zbpp.plan_model(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "ZBH1", n_stages=2,
        n_microbatches=2, recompute=what, costs={"m_r": 0.1},
    )  # fmt: skip


SCHEDULE = zbpp.plan("1F1B", n_stages=2, n_microbatches=2)
ACCEPTED_WORDS = "choose auto, all or none, or give numbers"
REFUSED = {
    "a word as time": (costs(f="fast"), "f is 'fast', not a number"),
    "a truth as time": (costs(f=True), "f is True, not a number"),
    "a table": (costs(f=np.ones((2, 2))), r"f\[0\] is \[1.0, 1.0\], not a number"),
    "an empty list": (costs(f=[]), r"f is \[\], not a number"),
    "not a number": (costs(f=np.array([1, np.nan])), "f is nan; it must be finite"),
    "a list of losses": (costs(loss=[1, 2]), "loss is a list; it must be one number"),
    "a unit's typo": (costs(m_b="1 gigs"), "m_b: '1 gigs' is no amount of memory"),
    "splits": (costs(splits=[1, 0]), "splits is .*, not a list of true or false"),
    "bytes beside M_B": (
        planned(memory_limit="6GiB"),
        "the largest memory of the costs is 1;",
    ),
    "a float": (planned(n_stages=2.0), "n_stages is 2.0; give a whole number"),
    "half of one": (planned(n_microbatches=2.5), "n_microbatches is 2.5; give a whole"),
    "chunks": (planned(chunks_per_stage="2"), "chunks_per_stage is '2'; give a whole"),
    "no mode": (planned(mode=None), "schedule is None; give a mode such as 'ZBH1'"),
    "costs": (planned(costs=3), "costs is an int; give zbpp.Costs, a dict"),
    "a mode to make": (lambda: zbpp.make_plan("ZBV"), "make_plan takes a PlanRequest"),
    "a mode to simulate": (
        lambda: simulator.simulate("ZBH1"),
        "simulate takes a Schedule or a Plan, not a str",
    ),
    "a schedule's rate": (
        lambda: simulator.bubble_rate(SCHEDULE),
        r"bubble_rate takes a Timeline, not a Schedule; zbpp.simulator.simulate\(",
    ),
    "a schedule's picture": (
        lambda: simulator.plot(SCHEDULE, "x.png"),
        "plot takes a Timeline, not a Schedule",
    ),
    "a schedule's trace": (
        lambda: simulator.write_trace([SCHEDULE], "x.json"),
        "write_trace takes a Timeline, not a Schedule",
    ),
    "Megatron's word": (recomputed("full"), ACCEPTED_WORDS),
    "a part of a word": (recomputed("al"), ACCEPTED_WORDS),
    "a truth to recompute": (recomputed(True), ACCEPTED_WORDS),
    "one to recompute": (recomputed(1), ACCEPTED_WORDS),
    "half to recompute": (recomputed([0.5]), "recompute is 0.5; give a whole number"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_ambiguous_is_refused_in_a_line(what):
    call, message = REFUSED[what]
    with pytest.raises(zbpp.RequestError, match=message) as refusal:
        call()
    assert "\n" not in str(refusal.value)


def test_words_and_arrays_that_recompute():
    for what, recompute in (("all", {0, 1}), (np.array([1]), {1}), ("1", {1})):
        assert recomputed(what)().recompute == recompute


def test_functions_of_schedules_take_plans_with_their_costs():
    request = PlanRequest(schedule="ZBH1", costs=zbpp.Costs(f=2.0, comm=0.5), **SIZES)
    plan = zbpp.make_plan(request)
    assert simulator.span(simulator.simulate(plan)) == plan.span
    assert simulator.simulate(plan) == simulator.simulate(plan.schedule, plan.costs)
    unit = simulator.simulate(plan, zbpp.Costs())
    assert unit == simulator.simulate(plan.schedule) != simulator.simulate(plan)
    path = simulator.critical_path(plan, with_steps=False)
    assert path.length == simulator.makespan(simulator.simulate(plan))
    steady = simulator.steady_step_time(plan)
    assert steady == simulator.steady_step_time(plan.schedule, costs=plan.costs)


def pipeline(**more):
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    settings = {"schedule": "ZBH1", "n_stages": 2, "n_microbatches": 2} | more
    return zbpp.Pipeline(
        layers, loss_fn=nn.functional.mse_loss, optimizer=torch.optim.AdamW, **settings
    )


@pytest.mark.parametrize("mesh", [2, "pp", zbpp.DataParallel(mesh="pp")])
def test_a_mesh_that_is_none_is_refused_in_a_line(mesh):
    with pytest.raises(zbpp.RequestError, match=r"mesh is .*; give zbpp.mesh\(stages="):
        pipeline(mesh=mesh)


def test_a_pipeline_switches_to_a_schedule_or_a_plan_but_not_to_a_mode():
    sizes = {"n_stages": 2, "n_microbatches": 2}
    with pipeline() as running:
        running.switch(zbpp.plan("1F1B", **sizes))
        plan = zbpp.make_plan(PlanRequest(schedule="FThenB", **sizes))
        running.switch(plan)
        assert running.schedule.name == "FThenB"
        with pytest.raises(
            zbpp.RequestError, match=r"not 'ZBV'; zbpp.plan\(mode, n_st"
        ):
            running.switch("ZBV")


def test_layers_that_leave_work_for_w_by_themselves_are_not_warned_of():
    layers = nn.Sequential(*(EmulatedLayer(0.0, 0.0, 0.0) for _ in range(2)))
    optimizer = partial(torch.optim.SGD, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with zbpp.Pipeline(
            layers, loss_fn=nn.functional.mse_loss, optimizer=optimizer,
            schedule="ZBH1", n_stages=2, n_microbatches=2,
        ) as running:  # fmt: skip
            running.step(torch.ones(4, 2), torch.ones(4, 2))
