"""Files changed at random are read, or refused in one sentence: nothing else."""

import json
import os
import random
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from layer_plan import plan_layers
from mangle import mangled_text

import zbpp
from zbpp.core import (
    Costs,
    RequestError,
    draw,
    parse_costs,
    parse_layers,
    parse_schedule,
    read_schedule,
    schedule_text,
)
from zbpp.schedules import plan_zb_v
from zbpp.simulator import bubble_rate, read_trace, simulate, write_trace

SCHEDULE = plan_zb_v(n_stages=2, n_microbatches=3)
SEEDS = st.integers(0, 2**32)
COSTS = json.dumps(
    {
        **{"f": 1.5, "b": [1.0, 2.0], "w": 0.7, "comm": 0.1, "optimizer": 0, "loss": 1},
        **{"m_b": 1.0, "m_w": 0.4, "memory_limit": [9, 8], "splits": [True, False]},
        **{"m_fixed": 0.5, "peak_f": 1.5, "send_occupies": 0.05, "reduction": 0.1},
    }
)
LAYERS = json.dumps(
    {
        **{"n_layers": 5, "f": [1, 2, 3, 2, 1], "b": 1.0, "w": 0.5, "pass_f": 0.1},
        **{"m_b": [1, 2, 1, 2, 1], "m_w": 0.4, "message": 5, "bandwidth": 10},
        **{"delay": 0.1, "memory_limit": 60, "m_r": 0.1, "parameters": 2},
    }
)


def use_schedule(text: str) -> None:
    draw(simulate(parse_schedule(text)))


def use_costs(text: str) -> None:
    costs = parse_costs(text)
    for mode in ("ZB", "ZBV", "1F1B"):
        with suppress(RequestError):
            plan = zbpp.plan(mode, n_stages=2, n_microbatches=3, costs=costs)
            bubble_rate(simulate(plan, costs))


def use_layers(text: str) -> None:
    plan_layers("ZBV", parse_layers(text), n_stages=2, n_microbatches=3, effort="fast")


def use_trace(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    for timeline in read_trace(path):
        draw(timeline, unit=1000.0)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_trace(simulate(SCHEDULE), path)
    return path


@pytest.mark.parametrize(
    ("use", "text"),
    [
        pytest.param(use_schedule, schedule_text(SCHEDULE), id="schedule"),
        pytest.param(use_costs, COSTS, id="costs"),
        pytest.param(use_layers, LAYERS, id="layers"),
    ],
)
@given(seed=SEEDS)
def test_a_mangled_file_is_read_or_refused(use, text, seed):
    use(text)  # the control: as it is, it can be used
    with suppress(RequestError):
        use(mangled_text(text, random.Random(seed)))


@given(seed=SEEDS)
def test_a_mangled_trace_is_read_or_refused(trace, seed):
    text = mangled_text(trace.read_text(encoding="utf-8"), random.Random(seed))
    with suppress(RequestError):
        use_trace(text, trace.with_name("mangled.json"))


EXTREMES = st.one_of(
    st.floats(0, 1e160), st.sampled_from([0.0, 5e-324, 1e-300, 1e-100, 1e100, 1e150])
)


@example(f=1e100, w=5e-324, m_b=5e-324, m_w=1e-300, limit=1e150)
@given(f=EXTREMES, w=EXTREMES, m_b=EXTREMES, m_w=EXTREMES, limit=EXTREMES)
def test_extreme_costs_are_planned_or_refused(f, w, m_b, m_w, limit):
    with suppress(RequestError):
        costs = Costs(f=f, w=w, m_b=m_b, m_w=m_w, memory_limit=limit)
        for mode in ("ZB", "ZBV"):
            with suppress(RequestError):
                plan = zbpp.plan(mode, n_stages=2, n_microbatches=4, costs=costs)
                bubble_rate(simulate(plan, costs))


@pytest.mark.parametrize("n_microbatches", [10**8, 10**30])
def test_few_jobs_of_many_microbatches_are_refused_without_counting_to_them(
    n_microbatches,
):
    data = json.loads(schedule_text(SCHEDULE))
    data |= {"n_microbatches": n_microbatches, "jobs": [["0F0"], ["1F0"]]}
    with pytest.raises(RequestError, match=r"0B0 .* is missing"):
        parse_schedule(json.dumps(data))


def test_an_endless_file_is_not_read_to_its_end():
    with pytest.raises(RequestError, match=r"/dev/zero: .* longer than"):
        read_schedule("/dev/zero")


def test_a_sparse_file_of_twenty_gigabytes_is_not_read(tmp_path: Path):
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 20 * 2**30)
    with pytest.raises(RequestError, match="longer than"):
        read_schedule(path)


def test_a_trace_of_more_stages_than_jobs_is_refused(trace, tmp_path):
    data = json.loads(trace.read_text(encoding="utf-8"))
    for event in data["traceEvents"]:
        if event.get("name") == "process_name":
            event["args"]["n_stages"] = 10**9
    with pytest.raises(RequestError, match="n_stages is 1000000000"):
        use_trace(json.dumps(data), tmp_path / "stages.json")
