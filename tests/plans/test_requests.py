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
    LimitError,
    Parts,
    Placement,
    RequestError,
    passes_in,
    peaks,
    write_schedule,
)
from zbpp.planning import MODES, PlanRequest, canonical, make_plan, plan
from zbpp.simulator import simulate, span

SPELLINGS = {
    "FThenB": ["fthenb", "F-then-B", "GPipe", "gpipe"],
    "1F1B": ["1f1b", "1F-1B"],
    "VPP": ["vpp", "Interleaved1F1B", "interleaved-1f1b", "interleaved_1f1b"],
    "ZBH1": ["zbh1", "ZB-H1", "zb_h1", "ZB1P", "zb-1p"],
    "ZBH2": ["zbh2", "ZB-H2", "ZB2P", "zb_2p"],
    "ZB": ["zb", "Z-B"],
    "ZBV": ["zbv", "ZB-V", "ZBVZeroBubble", "zbv-zero-bubble"],
    "ZBVPP": ["zbvpp", "ZB-VPP", "zb_v_pp"],
    "VHalf": ["vhalf", "V-Half", "v_half"],
    "VMin": ["vmin", "V-Min", "v_min"],
    "auto": ["AUTO", "Auto"],
}


def test_the_table_names_every_mode_with_one_line():
    assert set(SPELLINGS) <= set(MODES)
    for name, mode in MODES.items():
        assert mode.name == name
        assert mode.summary and "\n" not in mode.summary


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_reaches_its_mode(name):
    for spelling in (name, *SPELLINGS[name]):
        assert canonical(spelling) == name
    planned = plan(SPELLINGS[name][1], n_stages=2, n_microbatches=3)
    assert planned.name.partition(":")[0] == name


def test_no_two_modes_share_a_spelling():
    plain = [
        spelling.lower().replace("-", "").replace("_", "")
        for mode in MODES.values()
        for spelling in (mode.name, *mode.aliases)
    ]
    assert len(plain) == len(set(plain))


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("ZBH3", "ZBH"), ("zb-vv", "ZBV"), ("gpip", "FThenB")]
)
def test_an_unknown_mode_lists_the_choices_and_the_nearest(wrong, nearest):
    with pytest.raises(RequestError) as error:
        plan(wrong, n_stages=2, n_microbatches=2)
    message = str(error.value)
    assert f"unknown schedule mode {wrong!r}; did you mean {nearest}" in message
    assert ", ".join(MODES) in message and ".json" in message
    with pytest.raises(RequestError, match="unknown schedule mode ''"):
        canonical("")


@pytest.mark.parametrize("size", [{}, {"n_stages": 2}, {"n_microbatches": 2}])
def test_a_mode_needs_both_sizes(size):
    with pytest.raises(RequestError, match=r"is None; ZBH1 needs at least 1"):
        plan("zbh1", **size)


@pytest.mark.parametrize("mode", MODES)
def test_sizes_begin_at_one(mode):
    for wrong in (0, -3):
        text = f"is {wrong}; {mode} needs at least"
        with pytest.raises(RequestError, match=f"n_stages {text}"):
            plan(mode, n_stages=wrong, n_microbatches=2)
        with pytest.raises(RequestError, match=f"n_microbatches {text}"):
            plan(mode, n_stages=2, n_microbatches=wrong)


def test_a_limit_that_is_kept_stays_with_the_schedule():
    assert plan("ZBH2", n_stages=4, n_microbatches=8).costs is None
    schedule = plan("ZBH2", n_stages=4, n_microbatches=8, memory_limit=7)
    assert schedule.costs == Costs(memory_limit=7)


def test_a_limit_that_is_broken_says_what_is_needed_and_what_would_fit():
    with pytest.raises(RequestError) as error:
        plan("FThenB", n_stages=4, n_microbatches=8, memory_limit=4)
    message = str(error.value)
    assert message.startswith(
        "FThenB with 4 stages and 8 micro-batches needs memory 8 on stage 0, over the "
        "limit 4; "
    )
    would_fit = message.partition("; ")[2].partition(" would fit")[0].split(", ")
    assert {"1F1B", "ZBH1", "ZBH2", "ZB", "ZBV"} <= set(would_fit)
    assert not {"FThenB", "VPP"} & set(would_fit)
    for name in would_fit:
        schedule = plan(name, n_stages=4, n_microbatches=8, memory_limit=4)
        held = peaks(schedule.orders, Costs(memory_limit=4).on(schedule.placement))
        assert max(held) <= 4


def test_a_limit_per_stage_names_the_stage_that_exceeds_it_most():
    with pytest.raises(RequestError, match="needs memory 2 on stage 1, over the lim"):
        plan("FThenB", n_stages=2, n_microbatches=2, memory_limit=(2, 1.5))
    with pytest.raises(RequestError, match="memory_limit has 1 entries for 2 stages"):
        plan("FThenB", n_stages=2, n_microbatches=2, memory_limit=(2,))


def test_a_limit_below_one_microbatch_fits_no_mode():
    with pytest.raises(RequestError, match="no mode fits: take smaller micro-batches"):
        plan("ZBH1", n_stages=4, n_microbatches=8, memory_limit=0.9)


@pytest.mark.parametrize("n_microbatches", [1, 2, 3, 4, 5, 40])
@pytest.mark.parametrize("peak_o", [0.0, 3.0, 3.5])
def test_fthenb_is_named_where_all_its_forwards_fit(n_microbatches, peak_o):
    """ZBH1 does not: the inside of its B is large."""
    costs = Costs(m_b=(1.0, 0.5), m_fixed=0.25, peak_b=99.0, peak_bw=0.0, peak_o=peak_o)
    sizes = {"n_stages": 2, "n_microbatches": n_microbatches}
    schedule = plan("FThenB", **sizes)
    held = max(peaks(schedule.orders, costs.on(schedule.placement)))
    with pytest.raises(LimitError) as error:
        plan("ZBH1", **sizes, costs=replace(costs, memory_limit=3.5))
    assert ("FThenB" in str(error.value)) == (held <= 3.5)


def test_what_would_fit_is_the_same_for_many_micro_batches():
    said = []
    for m in (40, 2000):
        with pytest.raises(RequestError) as error:
            plan("VPP", n_stages=4, n_microbatches=m, memory_limit=4)
        said.append(str(error.value).partition("; ")[2])
    assert said[0] == said[1] and "1F1B, ZBH1" in said[0]


def test_lists_of_one_entry_a_stage_do_not_decide_the_number_of_chunks():
    held = Costs(m_fixed=(14.0, 10.0, 10.0, 14.0), memory_limit=20.0)
    shape = {"n_stages": 4, "n_microbatches": 12}
    longest = {}
    for mode in ("ZBV", "ZBVPP"):
        schedule = plan(mode, **shape, costs=held)
        assert schedule.placement == Placement.wave(4, 2)
        longest[mode] = span(simulate(schedule))
    assert longest["ZBVPP"] <= longest["ZBV"]
    assert plan("VPP", **shape, costs=held).placement.n_chunks == 8
    one = plan("ZBVPP", **shape, costs=held, chunks_per_stage=1)
    assert one.placement.n_chunks == 4, "the control"


def test_a_limit_that_is_too_low_names_the_smallest_that_works():
    for mode, smallest in (("FThenB", 8), ("1F1B", 4), ("VPP", 5.5)):
        with pytest.raises(RequestError, match=f"limit that works is {smallest:g}$"):
            plan(mode, n_stages=4, n_microbatches=8, memory_limit=1)
        schedule = plan(mode, n_stages=4, n_microbatches=8, memory_limit=smallest)
        assert schedule.costs == Costs(memory_limit=smallest)


def test_a_placement_that_holds_no_microbatch_names_the_mode_that_does():
    held = (2.0, 1.0, 1.0, 2.0)  # the V has both large chunks on stage 0
    memory = Costs(m_b=held, m_w=0.5, memory_limit=3)
    with pytest.raises(RequestError) as error:
        plan("ZBV", n_stages=2, n_microbatches=4, costs=memory)
    assert str(error.value) == (
        "ZBV with 2 stages and 4 micro-batches needs memory 4 on stage 0, over the "
        "limit 3; auto would fit: choose one, or raise memory_limit: the smallest "
        "limit that works is 4"
    )
    assert plan("auto", n_stages=2, n_microbatches=4, costs=memory).costs == memory


CHUNKED = tuple(mode.name for mode in MODES.values() if mode.chunks is None)


def test_chunks_per_stage_are_given_or_follow_from_the_lists():
    size = {"n_stages": 2, "n_microbatches": 3}
    for mode in ("VPP", "ZBVPP"):
        assert plan(mode, **size).placement.n_chunks == 4
        assert plan(mode, **size, chunks_per_stage=3).placement.n_chunks == 6
        for costs in (Costs(w=(1,) * 6), Costs(comm=(0.1,) * 5)):
            assert plan(mode, **size, costs=costs).placement.n_chunks == 6
        for comm in ((0.1,), (0.1, 0.2)):  # links say nothing of the chunks
            assert plan(mode, **size, costs=Costs(comm=comm)).placement.n_chunks == 4
        memory = Costs(m_b=(1,) * 8)
        assert plan(mode, **size, costs=memory).placement.n_chunks == 8
        with pytest.raises(RequestError, match="f has 6 entries for 4 chunks"):
            plan(mode, **size, chunks_per_stage=2, costs=Costs(f=(1,) * 6))
        with pytest.raises(RequestError, match="f has 5 entries for 4 chunks"):
            plan(mode, **size, costs=Costs(f=(1,) * 5))
    assert plan("auto", **size, chunks_per_stage=3).placement.n_chunks == 6


@pytest.mark.parametrize("mode", sorted({*MODES} - {*CHUNKED}))
def test_modes_of_a_fixed_number_refuse_another(mode):
    with pytest.raises(
        RequestError, match="choose one of VPP, ZBVPP, Combined1F1B, auto"
    ):
        plan(mode, n_stages=2, n_microbatches=3, chunks_per_stage=3)


@pytest.mark.parametrize("mode", CHUNKED)
def test_chunks_begin_at_one(mode):
    with pytest.raises(RequestError, match="chunks_per_stage is 0; "):
        plan(mode, n_stages=2, n_microbatches=3, chunks_per_stage=0)
    assert plan(mode, n_stages=2, n_microbatches=3, chunks_per_stage=1).n_stages == 2


JOINT = Costs(splits=(True, False))


@pytest.mark.parametrize("mode", MODES)
def test_no_mode_splits_a_backward_that_cannot_be_split(mode):
    if MODES[mode].order is not None and MODES[mode].splits:
        with pytest.raises(RequestError, match="but stage 1 cannot split its backward"):
            plan(mode, n_stages=2, n_microbatches=3, costs=JOINT)
        return
    schedule = plan(mode, n_stages=2, n_microbatches=3, costs=JOINT)
    kinds = {str(part.kind) for job in schedule.orders[1] for part in passes_in(job)}
    assert kinds == {"F", "BW"}


def test_a_file_that_splits_what_cannot_be_split_is_refused(tmp_path):
    path = str(tmp_path / "mine.json")
    write_schedule(plan("ZBH1", n_stages=2, n_microbatches=3), path)
    with pytest.raises(RequestError, match="ZBH1 runs 1B0, but stage 1 cannot split"):
        plan(path, costs=JOINT)
    write_schedule(plan("ZBH1", n_stages=2, n_microbatches=3, costs=JOINT), path)
    assert plan(path, costs=JOINT).name == "ZBH1"
    with pytest.raises(RequestError, match="splits has 1 entries for 2 stages"):
        plan(path, costs=Costs(splits=(True,)))


def test_a_schedule_file_is_a_mode(tmp_path, monkeypatch):
    schedule = plan("ZBV", n_stages=2, n_microbatches=3)
    path = tmp_path / "mine.json"
    write_schedule(schedule, path)
    assert plan(str(path)) == schedule
    assert plan(str(path), n_stages=2, n_microbatches=3) == schedule
    other = tmp_path / "no_suffix"
    write_schedule(schedule, other)
    assert plan(str(other)) == schedule
    (tmp_path / "zbh1").write_text("a file of that name does not hide the mode")
    monkeypatch.chdir(tmp_path)
    assert plan("zbh1", n_stages=2, n_microbatches=3).name == "ZBH1"


def test_a_schedule_file_must_agree_with_the_request(tmp_path):
    path = str(tmp_path / "mine.json")
    write_schedule(plan("1F1B", n_stages=2, n_microbatches=3), path)
    with pytest.raises(RequestError, match="n_stages is 2, but 4 is asked for"):
        plan(path, n_stages=4)
    with pytest.raises(RequestError, match="n_microbatches is 3, but 8 is asked for"):
        plan(path, n_microbatches=8)
    with pytest.raises(RequestError, match="chunks_per_stage is 1, but 2 is asked"):
        plan(path, chunks_per_stage=2)
    with pytest.raises(RequestError, match="1F1B with 2 stages and 3 micro-batches ne"):
        plan(path, memory_limit=1)
    assert plan(path, memory_limit=2).costs == Costs(memory_limit=2)


def test_a_file_that_is_absent_or_wrong_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"absent\.json: cannot be read"):
        plan(str(tmp_path / "absent.json"))
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(RequestError, match=r"wrong\.json: the key 'format' is missing"):
        plan(str(tmp_path / "wrong.json"))
    with pytest.raises(RequestError, match="unknown schedule mode"):
        plan(str(tmp_path))  # a directory is no schedule


def test_a_limit_may_be_a_number_or_a_text_and_is_put_into_the_costs():
    sizes = {"n_stages": 2, "n_microbatches": 4}
    assert plan("ZB", **sizes, memory_limit=2).costs == Costs(memory_limit=2.0)
    costs = Costs(m_b=2.0**30, m_w=2.0**29)
    limited = replace(costs, memory_limit=2.0**31)
    assert plan("ZB", **sizes, costs=costs, memory_limit="2GiB").costs == limited
    assert plan("ZB", **sizes, costs=limited).costs == limited
    with pytest.raises(LimitError, match=r"smallest limit that works is 1\.00 GiB"):
        plan("ZB", **sizes, costs=costs, memory_limit="1MiB")
    with pytest.raises(RequestError, match="largest memory of the costs is 1;"):
        plan("ZB", **sizes, memory_limit="2GiB")


# --- numbers, tables, words -----------------------------------------------------------

SIZES = {"n_stages": 4, "n_microbatches": 8}


@pytest.mark.parametrize("mode", ["1F1B", "ZBH1", "ZBV", "auto"])
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
    layers = LayerCosts(n_layers=2, m_r=0.1)
    sizes = {"n_stages": 2, "n_microbatches": 2, "effort": "fast"}
    request = {"schedule": "ZBH1", "costs": layers, "recompute": what}
    return lambda: make_plan(PlanRequest(**request, **sizes))


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
