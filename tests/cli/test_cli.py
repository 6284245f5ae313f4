"""The zbpp command: what it prints and writes."""

import json
from textwrap import dedent

import pytest
from commands import SIZES, ZBH1, shown

from zbpp.cli import main
from zbpp.core import Costs, read_schedule
from zbpp.planning import MODES, plan
from zbpp.schedules import to_torch_csv
from zbpp.simulator import bubble_rate, makespan, peak_memory, simulate, span


def test_plan_writes_the_schedule_and_torchs_csv(tmp_path, capsys):
    out, csv = tmp_path / "plan.json", tmp_path / "torch.csv"
    assert main(["plan", *ZBH1, "--out", str(out), "--csv", str(csv)]) == 0
    schedule = plan("ZBH1", n_stages=2, n_microbatches=3)
    assert read_schedule(out) == schedule
    assert csv.read_text() == to_torch_csv(schedule)
    assert capsys.readouterr().out == (
        f"{out}: ZBH1, 2 stages, 3 micro-batches, bubble rate 10.00%, peak memory 2, "
        "gap to the lower bound 0.00%\n"
        "torchtitan: --parallelism.pipeline_parallel_schedule 1F1B "
        f"--parallelism.pipeline_parallel_schedule_csv {csv} "
        "--parallelism.pipeline_parallel_degree 2 "
        "--parallelism.pipeline_parallel_microbatch_size 1 "
        "--training.local_batch_size 3\n"
    )


V_MODES = ("ZBV", "ZBVPP", "VHalf", "VMin", "DualPipeV")
V_MODES += ("auto",)  # it holds no more than p M_B here


@pytest.mark.parametrize("mode", MODES)
def test_plan_names_the_schedule_of_torchtitan_that_goes_with_the_csv(
    tmp_path, capsys, mode
):
    files = ["--out", str(tmp_path / "p.json"), "--csv", str(tmp_path / "t.csv")]
    assert main(["plan", *files, "--pipeline_schedule_mode", mode, *SIZES]) == 0
    name = "Interleaved1F1B" if mode in ("VPP", "Combined1F1B") else "1F1B"
    name = "ZBVZeroBubble" if mode in V_MODES else name
    _, line = capsys.readouterr().out.splitlines()
    assert f"pipeline_parallel_schedule {name} " in line


def test_plan_says_what_torchtitan_cannot_place_or_does_not_guess(tmp_path, capsys):
    files = ["--out", str(tmp_path / "p.json"), "--csv", str(tmp_path / "t.csv")]
    three = [*SIZES, *files, "--chunks_per_stage", "3", "--pipeline_schedule_mode"]
    assert main(["plan", *three, "ZBVPP"]) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "torchtitan: no schedule name places the chunks as 0 1 1 0 0"
    )
    assert main(["plan", *three, "VPP"]) == 0
    _, flags, more = capsys.readouterr().out.splitlines()
    assert "pipeline_parallel_schedule Interleaved1F1B " in flags
    assert more.endswith("so that there are 3 chunks a rank, 6 in all")


@pytest.mark.parametrize("c", ["-", "_"])
def test_flags_take_hyphens_and_underscores(capsys, c):
    mode, limit = f"--pipeline{c}schedule{c}mode", f"--memory{c}limit"
    data = shown(capsys, mode, "zb-h1", limit, "9", *SIZES)
    assert (data["mode"], data["memory_bound"]) == ("ZBH1", 9)


@pytest.mark.parametrize("mode", MODES)
def test_show_json_has_the_simulators_figures(capsys, costs_file, mode):
    data = shown(
        capsys,
        "--pipeline_schedule_mode",
        mode,
        "--stages",
        "3",
        "--microbatches",
        "7",
        "--costs",
        costs_file,
    )
    costs = Costs(3, 2, 1, 0.5, 7, m_b=4, m_w=1)
    timeline = simulate(plan(mode, n_stages=3, n_microbatches=7, costs=costs), costs)
    name = {"auto": "auto: interleaved ZB"}.get(mode, mode)
    assert (data["mode"], data["n_stages"], data["n_microbatches"]) == (name, 3, 7)
    assert data["bubble_rate"] == bubble_rate(timeline)
    assert data["span"] == span(timeline)
    assert data["makespan"] == makespan(timeline)
    assert data["peak_memory"] == peak_memory(timeline, costs)
    assert data["lower_bound"] <= data["span"]
    assert data["gap"] == pytest.approx(data["span"] / data["lower_bound"] - 1)


def test_the_lower_bound_is_that_of_the_given_memory(capsys):
    own = shown(capsys, "1F1B", "--stages", "4", "--microbatches", "8")
    assert (own["memory_bound"], own["lower_bound"], own["span"]) == (4, 27, 33)
    more = shown(
        capsys, "1F1B", "--stages", "4", "--microbatches", "8", "--memory_limit", "7"
    )
    assert (more["memory_bound"], more["lower_bound"]) == (7, 24)


def test_a_schedule_file_and_its_mode_show_the_same(tmp_path, capsys):
    out = tmp_path / "plan.json"
    main(["plan", *ZBH1, "--out", str(out)])
    capsys.readouterr()
    texts = []
    for arguments in ([str(out)], ["--pipeline_schedule_mode", str(out)], ZBH1):
        assert main(["show", *arguments]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]


def test_show_draws_and_tells(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["show", *ZBH1]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        dedent("""\
        ZBH1: 2 stages, 3 micro-batches
        0 | F0 F1 .  B0 W0 F2 B1 W1 B2 W2
        1 | .  F0 B0 F1 B1 W0 F2 B2 W1 W2
        """)
    )
    for line in (
        "│     1 │      1 │    9 │    9 │    0 │         1.5 │",
        "bubble rate    10.00% of the longest span is beyond the work of the busiest "
        "stage",
        "overhead       11.11% (the same over that work)",
        "makespan       10, first start to last end of a pass",
        "critical path  11 jobs, 10: F 3, B 4, W 3",
        "lower bound    10 for the span (proof: front and tail), within memory 2 a "
        "stage; gap 0.00%",
    ):
        assert line in text.splitlines()


@pytest.mark.parametrize("columns", [40, 80, 400])
def test_a_long_picture_is_cropped_to_the_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["show", "ZBV", "--stages", "4", "--microbatches", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    picture = [line for line in lines if line[:4] in ("0 | ", "1 | ", "2 | ", "3 | ")]
    assert len(picture) == 4
    assert max(map(len, picture)) <= columns
    note = (
        f"(the first {columns} of 207 columns; COLUMNS=207 zbpp show prints all of "
        "them, -o x.svg draws them)"
    )
    assert (note in lines) == (columns < 207)


@pytest.mark.parametrize("name", ["x.png", "x.svg", "x.pdf", "x.html"])
def test_show_writes_a_picture(tmp_path, capsys, name):
    pytest.importorskip("matplotlib")
    assert main(["show", *ZBH1, "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / name).stat().st_size > 1000
    assert capsys.readouterr().out == f"{tmp_path / name}\n"


def test_show_writes_a_trace(tmp_path, costs_file):
    out = tmp_path / "trace.json"
    assert main(["show", *ZBH1, "--costs", costs_file, "--out", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 9 + 2


def test_compare_has_a_row_for_each_mode(capsys, costs_file):
    sizes = ["--stages", "4", "--microbatches", "8"]
    assert main(["compare", *sizes]) == 0
    text = capsys.readouterr().out
    rows = {line.split()[1]: line for line in text.splitlines() if line[:1] == "│"}
    assert set(rows) == set(MODES)
    assert rows["1F1B"].split()[3:-1:2] == ["4", "27.27%", "33", "33", "4", "22.22%"]
    assert rows["ZBV"].split()[3:-1:2] == ["8", "0.00%", "24", "25.5", "4", "0.00%"]
    assert main(["compare", *sizes, "--costs", costs_file]) == 0
    assert capsys.readouterr().out != text


def test_compare_says_why_a_mode_cannot_be_had(capsys):
    sizes = ["--stages", "4", "--microbatches", "8"]
    assert main(["compare", *sizes, "--memory_limit", "4"]) == 0
    reasons = [
        line.split(" with ")[0]
        for line in capsys.readouterr().out.splitlines()
        if "needs memory" in line
    ]
    assert reasons == ["FThenB", "VPP", "DualPipeV", "Combined1F1B"]


@pytest.mark.parametrize("command", ["plan", "show"])
def test_the_number_of_chunks_is_a_flag(tmp_path, capsys, command):
    mode = ["--pipeline_schedule_mode", "ZBVPP", *SIZES, "--chunks-per-stage", "3"]
    out = str(tmp_path / "x.json")
    assert main([command, *mode, "--out", out]) == 0
    if command == "plan":
        assert read_schedule(out).placement.n_chunks == 6


def test_costs_name_links_loss_and_joint_stages(tmp_path, capsys):
    path, out = tmp_path / "costs.json", tmp_path / "plan.json"
    path.write_text('{"comm": [0.5], "loss": 0.25, "splits": [true, false]}')
    assert main(["plan", *ZBH1, "--costs", str(path), "--out", str(out)]) == 0
    assert '"1BW0"' in out.read_text() and '"1W0"' not in out.read_text()
    capsys.readouterr()
    assert main(["show", str(out), "--costs", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    costs = Costs(comm=(0.5,), loss=0.25, splits=(True, False))
    assert shown["span"] == span(simulate(read_schedule(out), costs))
    assert shown["lower_bound"] <= shown["span"]
    assert main(["show", *ZBH1, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["span"] < shown["span"]
