import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zbpp.core import RequestError, write_schedule
from zbpp.planning import make_plan, plan
from zbpp.training.llama import LlamaConfig
from zbpp.training.options import Train
from zbpp.training.setup import (
    costs_of,
    layers_of,
    model_of,
    plan_of,
    run_split,
    sleeping_layers,
    split_layers,
)
from zbpp.training.start import _for_world, start


def test_the_flags_load_no_torch():
    code = "import sys, zbpp.training.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_defaults_are_those_of_the_model():
    assert model_of(Train()) == LlamaConfig()


def test_the_effort_reaches_the_planner(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "zbpp.training.setup.make_plan",
        lambda request: asked.append(request) or make_plan(request),
    )
    plan_of(Train(effort="fast"))
    plan_of(Train())
    assert [request.effort for request in asked] == ["fast", "default"]


def test_the_memory_limit_overrules_that_of_the_costs_file(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"f": 2, "memory_limit": 7}')
    assert costs_of(Train(costs=path)).memory_limit == 7
    costs = costs_of(Train(costs=path, memory_limit=5.0))
    assert (costs.f, costs.memory_limit) == (2, 5.0)


@pytest.mark.parametrize(
    ("n_blocks", "n_chunks", "split"),
    [
        (8, 1, [10]),
        (8, 2, [5, 5]),
        (8, 4, [3, 2, 2, 3]),
        (8, 8, [2, 1, 1, 1, 1, 1, 1, 2]),
        (7, 4, [3, 2, 2, 2]),
        (6, 8, [1, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_blocks_are_dealt_evenly(n_blocks, n_chunks, split):
    assert split_layers(LlamaConfig(n_blocks=n_blocks), n_chunks) == split
    assert sum(split) == n_blocks + 2


def test_what_is_not_asked_for_has_a_default_or_is_as_in_the_file(tmp_path):
    schedule = plan_of(Train()).schedule
    assert (schedule.n_stages, schedule.n_microbatches) == (2, 8)
    path = tmp_path / "plan.json"
    write_schedule(plan("ZBV", n_stages=3, n_microbatches=5), path)
    assert plan_of(Train(pipeline_schedule_mode=str(path))).schedule.n_stages == 3
    with pytest.raises(RequestError, match="n_stages is 3, but 2 is asked for"):
        plan_of(Train(pipeline_schedule_mode=str(path), stages=2))


def test_torchrun_decides_how_many_stages_there_are():
    assert _for_world(Train(), 4).stages == 4
    assert _for_world(Train(stages=4), 4).stages == 4
    with pytest.raises(RequestError, match="--stages is 3, but torchrun has started 4"):
        _for_world(Train(stages=3), 4)
    assert _for_world(Train(data_parallel=2), 6).stages == 3
    with pytest.raises(RequestError, match=r"--data_parallel is 4 .* a multiple"):
        _for_world(Train(data_parallel=4), 6)


def test_processes_wait_for_one_another_as_long_as_was_asked(monkeypatch):
    waits = []
    monkeypatch.setattr(
        "zbpp.training.start.launch",
        lambda *_, timeout_s, **__: waits.append(timeout_s),
    )
    monkeypatch.delenv("RANK", raising=False)
    start(Train(stages=2, timeout_s=8.0, data=Path(__file__)))
    assert waits == [8.0]


TINY_LAYERS = {"n_layers": 10, "f": [1, *[2] * 8, 6]}


@pytest.fixture
def layers(tmp_path):
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(TINY_LAYERS))
    return path


def split_in(options: Train) -> tuple[int, ...]:
    return run_split(options, plan_of(options).schedule, model_of(options))


def test_the_split_is_balanced_once_costs_per_layer_are_known(layers, tmp_path):
    assert split_in(Train()) == (5, 5)  # the control
    assert split_in(Train(layers=layers)) == (6, 4)
    assert split_in(Train(layers=layers, split="even")) == (5, 5)
    assert split_in(Train(layers=layers, split="7,3")) == (7, 3)
    assert split_in(Train(split="7,3")) == (7, 3)
    plan_file = tmp_path / "plan.json"
    write_schedule(plan_of(Train(layers=layers)).schedule, plan_file)
    from_file = Train(pipeline_schedule_mode=str(plan_file))
    assert split_in(from_file) == (6, 4)
    assert split_in(replace(from_file, split="7,3")) == (7, 3)
    assert split_in(replace(from_file, split="even")) == (5, 5)


def test_costs_of_chunks_follow_from_the_split(layers):
    options = Train(layers=layers, memory_limit=90.0)
    costs = plan_of(options).costs
    assert costs.f == (11, 12) and costs.memory_limit == 90.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"split": "balanced"}, "there are no costs per layer"),
        ({"split": "7,4"}, "add up to 10 layers"),
        ({"split": "most"}, "split 'most' is not known"),
        ({"layers": "LAYERS", "n_blocks": 9}, "10 layers, but the model has 11"),
        ({"layers": "LAYERS", "costs": "LAYERS"}, "leave --costs out"),
    ],
)
def test_a_split_that_cannot_be_had_is_refused(layers, flags, message):
    flags = {key: layers if one == "LAYERS" else one for key, one in flags.items()}
    with pytest.raises(RequestError, match=re.escape(message)):
        split_in(Train(**flags))


def test_a_layers_file_can_be_emulated_under_any_model(layers):
    options = Train(emulate=layers, stages=3)
    schedule = plan_of(options).schedule
    assert sum(schedule.split) == 10
    assert sleeping_layers(options) == layers_of(options, 99)
    assert sleeping_layers(Train()) is None
