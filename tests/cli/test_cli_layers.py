"""Costs per layer on the command line: the split, its gain, and plans that carry it."""

import json
import re

import pytest
from commands import shown

from zbpp.cli import main
from zbpp.core import read_schedule

SIZES = ["--stages", "2", "--microbatches", "4", "--effort", "fast"]


@pytest.fixture
def layers(tmp_path):
    """Eight layers; the last one has a head that takes as long as two more."""
    times = [1, 1, 1, 1, 1, 1, 1, 3]
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"f": times, "b": times, "w": times}))
    return path


def test_plan_prints_and_writes_the_split_and_its_gain(tmp_path, capsys, layers):
    out = tmp_path / "plan.json"
    flags = ["--pipeline_schedule_mode", "ZBH1", "--layers", str(layers), *SIZES]
    assert main(["plan", *flags, "--out", str(out)]) == 0
    assert read_schedule(out).split == (5, 3)
    _, *lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "split  5 3 layers",
        "step   65; even chunks: 72, so 9.7% shorter",
        "idle   7.7% of the stages' time, unequal work included; even chunks: 16.7%",
    ]


@pytest.mark.parametrize("split", ["even", "4,4", "2,6"])
def test_a_split_that_is_asked_for_is_taken(tmp_path, capsys, layers, split):
    out = tmp_path / "plan.json"
    flags = ["--pipeline_schedule_mode", "1F1B", "--layers", str(layers), *SIZES]
    assert main(["plan", *flags, "--split", split, "--out", str(out)]) == 0
    wanted = (2, 6) if split == "2,6" else (4, 4)
    assert read_schedule(out).split == wanted
    assert ("longer" in capsys.readouterr().out) == (split == "2,6")


def test_a_plan_is_shown_with_the_times_of_its_own_split(tmp_path, capsys, layers):
    out = str(tmp_path / "plan.json")
    flags = ["--pipeline_schedule_mode", "ZBH1", "--layers", str(layers), *SIZES]
    assert main(["plan", *flags, "--split", "2,6", "--out", out]) == 0
    capsys.readouterr()
    asked = shown(capsys, out, "--layers", str(layers))
    even = shown(capsys, out, "--layers", str(layers), "--split", "even")
    assert asked["span"] == 4 * 3 * 8 > even["span"]


def test_modes_are_compared_each_with_its_own_split(capsys, layers):
    assert main(["compare", "--layers", str(layers), *SIZES]) == 0
    out = capsys.readouterr().out
    assert re.search(r"ZBH1 +split 5 3: 9\.7% shorter than even chunks", out)
    assert re.search(r"ZBV +split \d \d \d \d: 12\.5% shorter", out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--split", "odd"], "split 'odd' is not known"),
        (["--split", "4,3"], "add up to 8 layers"),
        (["--memory_limit", "2"], "limit that works is 4"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, capsys, layers, flags, message):
    out = ["--out", str(tmp_path / "plan.json"), "--layers", str(layers)]
    assert main(["plan", "ZBH1", *SIZES, *out, *flags]) == 2
    assert message in capsys.readouterr().err
