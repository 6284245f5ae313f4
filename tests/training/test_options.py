import json
import subprocess
import sys
from pathlib import Path

import pytest

from zbpp.core import RequestError, write_schedule
from zbpp.planning import plan
from zbpp.training.llama import LlamaConfig
from zbpp.training.options import TrainOptions
from zbpp.training.setup import (
    check,
    costs_of,
    model_of,
    plan_of,
    run_split,
    split_layers,
)
from zbpp.training.start import start_worker


def test_the_flags_load_no_torch():
    code = "import sys, zbpp.training.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_defaults_are_those_of_the_model():
    assert model_of(TrainOptions()) == LlamaConfig()


def test_the_memory_limit_overrules_that_of_the_costs_file(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"f": 2, "memory_limit": 7}')
    assert costs_of(TrainOptions(costs=path)).memory_limit == 7
    costs = costs_of(TrainOptions(costs=path, memory_limit=5.0))
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
    schedule = plan_of(TrainOptions()).schedule
    assert (schedule.n_stages, schedule.n_microbatches) == (2, 8)
    path = tmp_path / "plan.json"
    write_schedule(plan("ZBV", n_stages=3, n_microbatches=5), path)
    assert (
        plan_of(TrainOptions(pipeline_schedule_mode=str(path))).schedule.n_stages == 3
    )
    with pytest.raises(RequestError, match="n_stages is 3, but 2 is asked for"):
        plan_of(TrainOptions(pipeline_schedule_mode=str(path), stages=2))


@pytest.mark.parametrize("stages", [None, 4, 3])
def test_torchrun_decides_how_many_stages_there_are(monkeypatch, capsys, stages):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr("os._exit", sys.exit)
    plans = []
    with pytest.raises(SystemExit) as ended:
        start_worker(
            lambda _, plan: plans.append(plan),
            TrainOptions(stages=stages, data=Path(__file__)),
            ["train"],
            check=check,
        )
    if stages == 3:
        assert ended.value.code == 2
        assert "--stages is 3, but torchrun has started 4" in capsys.readouterr().err
    else:
        assert ended.value.code == 0
        assert [plan.schedule.n_stages for plan in plans] == [4]


TINY_LAYERS = {"n_layers": 10, "f": [1, *[2] * 8, 6]}


@pytest.fixture
def layers(tmp_path):
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(TINY_LAYERS))
    return path


def split_in(options: TrainOptions) -> tuple[int, ...]:
    return run_split(plan_of(options).schedule, model_of(options))


def test_the_split_is_balanced_once_costs_per_layer_are_known(layers, tmp_path):
    assert split_in(TrainOptions()) == (5, 5)  # the control
    assert split_in(TrainOptions(layers=layers)) == (6, 4)
    plan_file = tmp_path / "plan.json"
    write_schedule(plan_of(TrainOptions(layers=layers)).schedule, plan_file)
    assert split_in(TrainOptions(pipeline_schedule_mode=str(plan_file))) == (6, 4)


def test_costs_of_chunks_follow_from_the_split(layers):
    options = TrainOptions(layers=layers, memory_limit=90.0)
    costs = plan_of(options).costs
    assert costs.f == (11, 12) and costs.memory_limit == 90.0


def test_layers_of_another_model_are_refused(layers):
    with pytest.raises(RequestError, match="10 layers, but the model has 6"):
        split_in(TrainOptions(layers=layers, size="tiny"))
    with pytest.raises(RequestError, match="leave --costs out"):
        split_in(TrainOptions(layers=layers, costs=layers))
