"""The zbpp command: steps in a row, behind a barrier and post-validated."""

import json
from textwrap import dedent

import pytest
from commands import SIZES, ZBH1, shown

from zbpp.cli import main
from zbpp.cli.parser import application, parse
from zbpp.core import read_schedule
from zbpp.planning import plan
from zbpp.schedules import post_validated
from zbpp.training.options import TrainOptions

VALIDATED, BARRIER = (f"--{no}enable_optimizer_post_validation" for no in ("", "no-"))


def test_plan_places_vs_only_where_they_are_asked_for(tmp_path, capsys):
    """Readers that know no V still read what is planned without the flag."""
    texts = {}
    for flags in ((), (BARRIER,), (VALIDATED,)):
        out, csv = tmp_path / "plan.json", tmp_path / "torch.csv"
        files = ["--out", str(out), "--csv", str(csv)]
        assert main(["plan", *ZBH1, *files, *flags]) == 0
        texts[flags] = out.read_text(), csv.read_text()
    assert texts[()] == texts[BARRIER,]
    assert texts[VALIDATED,][1] == texts[()][1]
    assert read_schedule(out) == post_validated(
        plan("ZBH1", n_stages=2, n_microbatches=3)
    )
    assert '"V"' not in texts[()][0]
    capsys.readouterr()
    assert main(["show", str(out), BARRIER]) == 0
    without = capsys.readouterr().out
    assert main(["show", *ZBH1]) == 0
    assert capsys.readouterr().out == without


def test_several_iterations_are_drawn_behind_a_barrier_and_post_validated(
    capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "100")
    mode = ["ZBH2", *SIZES, "--iterations", "2"]
    assert main(["show", *mode]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "\n".join(lines[1:8]) == dedent("""\
        ZBH2, 2 iterations behind a barrier:
        0 | F0 F1 F2 B0 W0 B1 W1 B2 W2 .  F0 F1 F2 B0 W0 B1 W1 B2 W2
        1 | .  F0 B0 F1 B1 F2 B2 W0 W1 W2 .  F0 B0 F1 B1 F2 B2 W0 W1 W2
        ZBH2, 2 iterations, post-validated:
        0 | F0  F1  F2  VB0 W0  B1  W1  B2  W2  F0  F1  F2  VB0 W0  B1  W1  B2  W2
        1 | .   F0  VB0 F1  B1  F2  B2  W0  W1  W2  F0  VB0 F1  B1  F2  B2  W0  W1  W2
        """)
    told = "steady step    9 post-validated (a rollback adds 3), 10 behind a barrier"
    assert told in lines
    for flag, drawn in ((BARRIER, lines[1:4]), (VALIDATED, lines[4:7])):
        assert main(["show", *mode, flag]) == 0
        chosen = capsys.readouterr().out.splitlines()
        assert chosen[1:4] == drawn and chosen[4] == ""


def test_pictures_and_traces_hold_the_iterations(tmp_path):
    pytest.importorskip("matplotlib")
    mode = ["ZBH2", *SIZES, "--iterations", "2"]
    picture, trace = tmp_path / "x.svg", tmp_path / "t.json"
    assert main(["show", *mode, "--out", str(picture)]) == 0
    for text in ("behind a barrier", "post-validated", "V  validation", "idle 0.00 %"):
        assert text in picture.read_text()
    assert main(["show", *mode, "--out", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = [(event["pid"], event["name"]) for event in events if event["ph"] == "X"]
    assert [names.count((run, "V")) for run in (0, 1)] == [0, 2 * 2]
    assert [names.count((run, "O")) for run in (0, 1)] == [2 * 2, 2 * 2]


def test_show_json_tells_the_steady_step_times(capsys, costs_file):
    data = shown(capsys, "ZBH2", "--stages", "3", "--microbatches", "6")
    assert data["step_time_barrier"] == data["makespan"] == 20
    assert data["step_time_post_validation"] == data["span"] == 18
    assert data["rollback_time"] == 5
    sizes = ["ZBH2", "--stages", "3", "--microbatches", "6", "--costs", costs_file]
    data, other = shown(capsys, *sizes), shown(capsys, *sizes, VALIDATED)
    assert data["step_time_barrier"] > data["step_time"]  # the sum takes time too
    del data["step_time"], other["step_time"]  # post-validated, O waits for nobody
    assert data == other


def test_compare_adds_the_steady_step_times(capsys):
    sizes = ["compare", "--stages", "4", "--microbatches", "8"]
    for flag, expected in ((VALIDATED, ["27", "24"]), (BARRIER, ["27"])):
        assert main([*sizes, flag]) == 0
        text = capsys.readouterr().out
        (row,) = (line for line in text.splitlines() if line.startswith("│ ZBH2"))
        assert row.split()[3:-1:2][6:] == expected
        assert "step: the time of one among many" in text


def test_post_validation_is_a_flag_of_three_states():
    name = "enable_optimizer_post_validation"
    for words, value in (
        ([], None),
        ([f"--{name}"], True),
        (["--enable-optimizer-post-validation", "--steps", "3"], True),
        ([f"--no-{name}"], False),
        (["--no_enable_optimizer_post_validation"], False),
        (["--no-enable-optimizer-post-validation"], False),
    ):
        options = parse(application({"train": TrainOptions}), ["train", *words])
        assert options.enable_optimizer_post_validation is value, words
