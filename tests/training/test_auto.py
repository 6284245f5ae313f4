"""`zbpp train --pipeline_schedule_mode auto`: measured first, and the same bits."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from training_here import train_here

from zbpp.core import Costs, RequestError, write_costs
from zbpp.training.options import TrainOptions
from zbpp.training.setup import measures_first, plan_of

TINY = TrainOptions(
    stages=2,
    microbatches=4,
    microbatch_size=1,
    seq=16,
    steps=3,
    size="tiny",
    clip_grad_norm=0.5,
    data=Path(__file__),
)


def last_line(options: TrainOptions, tmp_path: Path) -> dict[str, object]:
    path = tmp_path / "run.jsonl"
    train_here(replace(options, metrics=path))
    final: dict[str, object] = json.loads(path.read_text().splitlines()[-1])
    return final


@pytest.mark.slow
def test_it_trains_as_every_mode_does_and_says_what_it_chose(tmp_path, capsys):
    fixed = last_line(TINY, tmp_path)
    capsys.readouterr()
    auto = replace(TINY, pipeline_schedule_mode="auto", memory_limit=2.0**30)
    measured = last_line(auto, tmp_path)
    said = capsys.readouterr().out
    assert "auto: ZB" in said or "auto: interleaved" in said or "auto: V" in said
    assert "; predicted step " in said and "simulated with given costs" in said
    for name in ("params_sha256", "val_loss"):
        assert measured[name] == fixed[name]
    other = last_line(replace(TINY, seed=1), tmp_path)  # the hash sees a difference
    assert other["params_sha256"] != fixed["params_sha256"]


@pytest.mark.slow
def test_what_fits_no_stage_is_refused_with_the_sizes():
    with pytest.raises(RequestError, match="the smallest limit that works is"):
        train_here(
            replace(
                TINY, pipeline_schedule_mode="auto", memory_limit=2.0**20, size="small"
            )
        )


def test_a_fixed_mode_needs_costs_in_bytes_for_a_limit_in_bytes():
    with pytest.raises(RequestError, match="largest memory of the costs is 1;"):
        train_here(replace(TINY, memory_limit=2.0**30))


def test_costs_that_are_given_are_not_measured(tmp_path):
    auto = replace(TINY, pipeline_schedule_mode="Auto")
    assert measures_first(auto) and plan_of(auto).schedule.n_stages == 2
    path = tmp_path / "costs.json"
    write_costs(Costs(), path)
    assert not measures_first(replace(auto, costs=path))
    assert not measures_first(TINY)
