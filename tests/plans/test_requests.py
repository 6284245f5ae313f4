"""From what a user writes to a plan: modes, sizes, limits, files; and refusals."""

import json
from dataclasses import replace

import numpy as np
import pytest

import zbpp
from zbpp import simulator
from zbpp.core import (
    Costs,
    LayerCosts,
    RequestError,
    passes_in,
    write_schedule,
)
from zbpp.planning import MODES, PlanRequest, canonical, make_plan, plan

SMALL = {"n_stages": 2, "n_microbatches": 3}
JOINT = Costs(splits=(True, False))
CHUNKED = tuple(mode.name for mode in MODES.values() if mode.chunks is None)


ALIASES = {
    "GPipe": "FThenB",
    "ZB1P": "ZBH1",
    "ZB2P": "ZBH2",
    "Interleaved1F1B": "VPP",
    "ZBVZeroBubble": "ZBV",
}


@pytest.mark.parametrize("name", MODES)
def test_every_spelling_reaches_its_mode(name):
    mode = MODES[name]
    assert mode.name == name and mode.summary and "\n" not in mode.summary
    aliases = {
        alias for alias, canonical_name in ALIASES.items() if canonical_name == name
    }
    assert aliases <= set(mode.aliases)
    for spelling in (name, *mode.aliases):
        for text in (spelling, spelling.lower(), spelling.upper(), "-".join(spelling)):
            assert canonical(text) == name == canonical(text.replace("-", "_"))
    assert plan(name.lower(), **SMALL).name.partition(":")[0] == name


def test_chunks_per_stage_are_two_or_as_asked():
    for mode, more, n_chunks in (
        ("VPP", {}, 4),
        ("ZBVPP", {"chunks_per_stage": 3}, 6),
        ("auto", {"chunks_per_stage": 3}, 6),
        ("auto", {"costs": Costs(comm=(0.1,) * 3)}, 4),  # one entry an edge
    ):
        assert plan(mode, **SMALL, **more).placement.n_chunks == n_chunks


# Mode, other parts of the request, and the text of the refusal.
REFUSED_PLANS = [
    ("ZBH3", {}, "unknown schedule mode 'ZBH3'; did you mean ZBH"),
    ("zb-vv", {}, "unknown schedule mode 'zb-vv'; did you mean ZBV"),
    ("gpip", {}, f"'gpip'; did you mean FThenB.*{', '.join(MODES)}.*json"),
    ("", {}, "unknown schedule mode ''"),
    ("zbh1", {"n_stages": None}, "is None; ZBH1 needs at least 1"),
    ("zbh1", {"n_microbatches": None}, "is None; ZBH1 needs at least 1"),
    *(
        (mode, {size: wrong}, f"{size} is {wrong}; {mode} needs at least")
        for mode in MODES
        for size, wrong in (("n_stages", 0), ("n_microbatches", -3))
    ),
    # chunks
    *(
        (mode, {"chunks_per_stage": 3}, "choose one of VPP, ZBVPP, Combined1F1B, auto")
        for mode in MODES
        if MODES[mode].chunks is not None
    ),
    *((mode, {"chunks_per_stage": 0}, "chunks_per_stage is 0; ") for mode in CHUNKED),
    ("VPP", {"costs": Costs(f=(1,) * 5)}, "f has 5 entries for 4 chunks"),
    (
        "ZBVPP",
        {"chunks_per_stage": 2, "costs": Costs(f=(1,) * 6)},
        "f has 6 entries for 4 chunks",
    ),
    # limits
    ("FThenB", {"memory_limit": (3, 1.5)}, "needs memory 3 on stage 1, over the limit"),
    ("FThenB", {"memory_limit": (2,)}, "memory_limit has 1 entries for 2 stages"),
    ("FThenB", {"memory_limit": 1}, "limit that works is 3: take smaller"),
    ("VPP", {"memory_limit": 1}, "limit that works is 3: "),
    (
        "ZB",
        {"costs": Costs(m_b=2.0**30, m_w=2.0**29), "memory_limit": "1MiB"},
        r"smallest limit that works is 1\.00 GiB",
    ),
    (  # the V has both large chunks on stage 0
        "ZBV",
        {"costs": Costs(m_b=(2.0, 1.0, 1.0, 2.0), memory_limit=3)},
        "^ZBV with 2 stages and 3 micro-batches needs memory 4 on stage 0, over the "
        "limit 3; the smallest limit that works is 4: take smaller micro-batches, or "
        "raise memory_limit to 4 or more$",
    ),
    # efforts
    *(
        ("ZB", {"effort": effort}, "choose fast, default, best")
        for effort in ("", "worst", "fast:3", "best:", "best:-1", "best:nan")
    ),
    # backwards that cannot be split
    *(
        (mode, {"costs": JOINT}, "but stage 1 cannot split its backward")
        for mode in ("DualPipeV",)
    ),
]


@pytest.mark.parametrize(("mode", "more", "message"), REFUSED_PLANS)
def test_impossible_requests_are_refused_with_a_correction(mode, more, message):
    with pytest.raises(RequestError, match=message):
        plan(mode, **SMALL | more)


@pytest.mark.parametrize(
    ("mode", "more", "message"),
    [
        ("1F1B", {"n_stages": 4}, "n_stages is 2, but 4 is asked for"),
        ("1F1B", {"n_microbatches": 8}, "n_microbatches is 3, but 8 is asked for"),
        ("1F1B", {"chunks_per_stage": 2}, "chunks_per_stage is 1, but 2 is asked"),
        ("1F1B", {"memory_limit": 1}, "1F1B with 2 stages and 3 micro-batches needs"),
        ("ZBH1", {"costs": JOINT}, "ZBH1 runs 1B0, but stage 1 cannot split"),
        ("1F1B", {"costs": Costs(splits=(True,))}, "splits has 1 entries for 2 stages"),
    ],
)
def test_a_schedule_file_must_agree_with_the_request(mode, more, message, tmp_path):
    path = str(tmp_path / "mine.json")
    write_schedule(plan(mode, **SMALL), path)
    assert plan(path) == plan(mode, **SMALL)
    with pytest.raises(RequestError, match=message):
        plan(path, **more)


def test_a_schedule_file_is_a_mode(tmp_path, monkeypatch):
    schedule = plan("ZBV", **SMALL)
    path = tmp_path / "no_suffix"
    write_schedule(schedule, path)
    assert plan(str(path)) == schedule == plan(str(path), **SMALL)
    found = make_plan(PlanRequest(schedule=path, memory_limit=2))
    assert found.costs == Costs(memory_limit=2) and found.schedule == schedule
    (tmp_path / "zbh1").write_text("a file of that name does not hide the mode")
    monkeypatch.chdir(tmp_path)
    assert plan("zbh1", **SMALL).name == "ZBH1"
    (tmp_path / "wrong.json").write_text("{}")
    for name, message in (
        ("absent.json", r"absent\.json: cannot be read"),
        ("wrong.json", r"wrong\.json: the key 'format' is missing"),
        (".", "unknown schedule mode"),
    ):
        with pytest.raises(RequestError, match=message):
            plan(name)


def test_a_limit_replaces_that_of_the_costs():
    def costs_of(mode: str, **more: object) -> Costs:
        return make_plan(PlanRequest(schedule=mode, **SMALL, **more)).costs

    assert costs_of("ZBH2") == Costs()
    assert costs_of("ZBH2", memory_limit=3) == Costs(memory_limit=3)
    costs = Costs(m_b=2.0**30, m_w=2.0**29)
    limited = replace(costs, memory_limit=2.0**31)
    assert costs_of("ZB", costs=costs, memory_limit="2GiB") == limited
    assert costs_of("ZB", costs=limited) == limited


@pytest.mark.parametrize("mode", sorted({*MODES} - {"DualPipeV"}))
def test_no_mode_splits_a_backward_that_cannot_be_split(mode):
    schedule = plan(mode, **SMALL, costs=JOINT)
    kinds = {str(part.kind) for job in schedule.orders[1] for part in passes_in(job)}
    assert kinds == {"F", "BW"}


# --- numbers, tables, words -----------------------------------------------------------

SIZES = {"n_stages": 4, "n_microbatches": 8}


@pytest.mark.parametrize("mode", ["1F1B", "ZBH1"])
def test_numbers_lists_and_arrays_plan_as_tuples_do(mode):
    times, limits = (1.0, 1.5, 1.0, 2.0), (4.0, 4.5, 5.0, 6.0)
    plain = zbpp.plan(mode, costs=zbpp.Costs(f=times, memory_limit=limits), **SIZES)
    numpy_sizes = {name: np.int64(size) for name, size in SIZES.items()}
    for costs, sizes in (
        (zbpp.Costs(f=list(times), memory_limit=list(limits)), SIZES),
        (zbpp.Costs(f=np.array(times), memory_limit=np.array(limits)), numpy_sizes),
        (zbpp.Costs(f=np.array(times, dtype=np.float32), memory_limit=limits), SIZES),
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


def costs(**columns):
    return lambda: zbpp.Costs(**columns)


def planned(**more):
    return lambda: zbpp.plan(
        **{"mode": "ZBH1", "n_stages": 2, "n_microbatches": 2, **more}
    )


def recomputed(what):
    layers = LayerCosts(n_layers=2, m_r=0.1)
    sizes = {"n_stages": 2, "n_microbatches": 2, "effort": "fast"}
    request = {"schedule": "ZBH1", "costs": layers, "recompute": what}
    return lambda: make_plan(PlanRequest(**request, **sizes))


SCHEDULE = zbpp.plan("1F1B", n_stages=2, n_microbatches=2)
ACCEPTED_WORDS = "choose auto, all or none, or give numbers"
REFUSED = {
    "a table": (costs(f=np.ones((2, 2))), r"f\[0\] is \[1.0, 1.0\], not a number"),
    "a unit's typo": (costs(m_b="1 gigs"), "m_b: '1 gigs' is no amount of memory"),
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
def test_ambiguous_requests_are_refused_in_one_line(what):
    call, message = REFUSED[what]
    with pytest.raises(zbpp.RequestError, match=message) as refusal:
        call()
    assert "\n" not in str(refusal.value)


def test_functions_of_schedules_take_plans_with_their_costs():
    request = PlanRequest(schedule="ZBH1", costs=zbpp.Costs(f=2.0, comm=0.5), **SIZES)
    plan = zbpp.make_plan(request)
    assert simulator.span(simulator.simulate(plan)) == plan.span
    assert simulator.simulate(plan) == simulator.simulate(plan.schedule, plan.costs)
    unit = simulator.simulate(plan, zbpp.Costs())
    assert unit == simulator.simulate(plan.schedule) != simulator.simulate(plan)
    path = simulator.critical_path(plan)
    assert path.length == simulator.step_time(simulator.simulate(plan))
    steady = simulator.steady_step_time(plan)
    assert steady == simulator.steady_step_time(plan.schedule, costs=plan.costs)
