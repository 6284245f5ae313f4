"""The zbpp command: what it prints and writes, and its exit codes."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from textwrap import dedent

import pytest
import tyro

from zbpp import doctor
from zbpp.cli import _spelled_out, main
from zbpp.core import Costs, MemoryModel, read_schedule
from zbpp.modes import MODES, plan
from zbpp.schedules import post_validated, to_torch_csv
from zbpp.simulator import bubble_rate, makespan, peak_memory, simulate, span
from zbpp.training.options import Train

SIZES = ["--stages", "2", "--microbatches", "3"]
ZBH1 = ["--pipeline_schedule_mode", "ZBH1", *SIZES]
COSTS = '{"f": 3, "b": 2, "w": 1, "comm": 0.5, "m_b": 4, "m_w": 1, "optimizer": 7}'


@pytest.fixture
def costs_file(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(COSTS, encoding="utf-8")
    return str(path)


def run(*arguments):
    """Run a real process, as a shell would."""
    command = [sys.executable, "-m", "zbpp", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def shown(capsys, *arguments):
    """What ``zbpp show --json`` prints."""
    assert main(["show", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_writes_the_schedule_and_torchs_csv(tmp_path, capsys):
    out, csv = tmp_path / "plan.json", tmp_path / "torch.csv"
    assert main(["plan", *ZBH1, "--out", str(out), "--csv", str(csv)]) == 0
    schedule = plan("ZBH1", n_stages=2, n_microbatches=3)
    assert read_schedule(out) == schedule
    assert csv.read_text() == to_torch_csv(schedule)
    assert capsys.readouterr().out == (
        f"{out}: ZBH1, 2 stages, 3 micro-batches, bubble rate 10.00%, peak memory 2, "
        "gap to the lower bound 0.00%\n"
    )


@pytest.mark.parametrize("c", ["-", "_"])
def test_flags_take_hyphens_and_underscores(capsys, c):
    mode, limit = f"--pipeline{c}schedule{c}mode", f"--memory{c}limit"
    data = shown(capsys, mode, "zb-h1", limit, "9", *SIZES)
    assert (data["mode"], data["memory_bound"]) == ("ZBH1", 9)


@pytest.mark.parametrize("mode", MODES)
def test_show_json_has_the_simulators_figures(capsys, costs_file, mode):
    data = shown(
        capsys,
        *("--pipeline_schedule_mode", mode, "--stages", "3", "--microbatches", "7"),
        *("--costs", costs_file),
    )
    costs, memory = Costs(3, 2, 1, 0.5, 7), MemoryModel(4, 1)
    timeline = simulate(
        plan(mode, n_stages=3, n_microbatches=7, costs=costs, memory=memory), costs
    )
    assert (data["mode"], data["n_stages"], data["n_microbatches"]) == (mode, 3, 7)
    assert data["bubble_rate"] == bubble_rate(timeline)
    assert data["span"] == span(timeline)
    assert data["makespan"] == makespan(timeline)
    assert data["peak_memory"] == peak_memory(timeline, memory)
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
        "bubble rate    10.00% of the longest span is idle",
        "overhead       11.11% (idle time over ideal time)",
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
    note = f"(the first {columns} of 207 columns; zbpp plot draws everything)"
    assert (note in lines) == (columns < 207)


@pytest.mark.parametrize("name", ["x.png", "x.svg", "x.pdf", "x.html"])
def test_plot_writes_a_picture(tmp_path, capsys, name):
    pytest.importorskip("matplotlib")
    assert main(["plot", *ZBH1, "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / name).stat().st_size > 1000
    assert capsys.readouterr().out == f"{tmp_path / name}\n"


def test_trace_writes_a_trace(tmp_path, costs_file):
    out = tmp_path / "trace.json"
    assert main(["trace", *ZBH1, "--costs", costs_file, "--out", str(out)]) == 0
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
    assert reasons == ["FThenB", "VPP"]


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


def test_plots_and_traces_hold_the_iterations(tmp_path):
    pytest.importorskip("matplotlib")
    mode = ["ZBH2", *SIZES, "--iterations", "2"]
    picture, trace = tmp_path / "x.svg", tmp_path / "t.json"
    assert main(["plot", *mode, "--out", str(picture)]) == 0
    for text in ("behind a barrier", "post-validated", "V  validation", "idle 0.00 %"):
        assert text in picture.read_text()
    assert main(["trace", *mode, "--out", str(trace)]) == 0
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


@pytest.mark.parametrize("command", ["plan", "show", "plot", "trace"])
def test_the_number_of_chunks_is_a_flag(tmp_path, capsys, command):
    if command == "plot":
        pytest.importorskip("matplotlib")
    mode = ["--pipeline_schedule_mode", "ZBVPP", *SIZES, "--chunks-per-stage", "3"]
    out = [] if command == "show" else ["--out", str(tmp_path / "x.json")]
    if command == "plot":
        out[1] = str(tmp_path / "x.svg")
    assert main([command, *mode, *out]) == 0
    if command == "plan":
        assert read_schedule(out[1]).placement.n_chunks == 6


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


def test_doctor_tells_what_is_installed(capsys):
    assert main(["doctor"]) == 0
    facts = dict(
        (line[:14].strip(), line[15:]) for line in capsys.readouterr().out.splitlines()
    )
    assert facts["zbpp"] == version("zbpp")
    assert facts["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert {"CPU cores", "numpy", "matplotlib", "torch"} <= set(facts)


def test_doctor_tells_what_is_missing_and_how_to_get_it(monkeypatch):
    def hide(package):
        if package in ("torch", "matplotlib"):
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(doctor, "version", hide)
    lines = doctor.report_lines()
    assert "matplotlib     missing: pip install 'zbpp[viz]'" in lines
    assert "torch          missing: pip install 'zbpp[train]'" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show"], "zbpp: no schedule is named; give a schedule file"),
        (["show", "x.json", *ZBH1], "zbpp: two schedules are named"),
        (["show", "missing.json"], "zbpp: missing.json: cannot be read"),
        (["show", "ZBW", *SIZES], "zbpp: unknown schedule mode 'ZBW'; did you mean"),
        (["show", "ZBV", "--stages", "2"], "zbpp: --microbatches is missing; ZBV"),
        (["show", "ZBV", "--stages", "0"], "zbpp: --stages is 0; it must be at least"),
        (["show", *ZBH1, "--memory_limit", "0.9"], "zbpp: ZBH1 with 2 stages and"),
        (
            ["show", "ZBV", *SIZES, "--chunks_per_stage", "3"],
            "zbpp: chunks_per_stage i",
        ),
        (["show", "VPP", *SIZES, "--chunks_per_stage", "0"], "zbpp: --chunks_per_stag"),
        (["show", *ZBH1, "--iterations", "0"], "zbpp: --iterations is 0; it must be"),
        (["show", *ZBH1, "--effort", "worst"], "zbpp: effort 'worst' is not known"),
        (["show", *ZBH1, "--costs", "no.json"], "zbpp: no.json: cannot be read"),
        (["plot", *ZBH1, "--out", "x.gif"], "zbpp: x.gif: the name of a picture must"),
        (["plan", *ZBH1, "--out", "no/x.json"], "zbpp: no/x.json: cannot be written"),
        (["trace", *ZBH1, "--out", "no/x.json"], "zbpp: no/x.json: cannot be written"),
        (["compare", *SIZES, "--memory_limit", "0.9"], "zbpp: no mode can be had"),
    ],
)
def test_a_wrong_request_gives_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(message)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_wrong_schedule_file_shows_the_place(tmp_path, capsys):
    path = tmp_path / "plan.json"
    main(["plan", *ZBH1, "--out", str(path)])
    assert main(["show", str(path)]) == 0
    path.write_text(path.read_text().replace("0B0", "0B1", 1))
    capsys.readouterr()
    assert main(["show", str(path)]) == 2
    first, *grid = capsys.readouterr().err.splitlines()
    assert first.startswith(f"zbpp: {path}: row 0, column")
    assert any("^" in line for line in grid)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["shwo"],
        ["show", "--stagse", "2"],
        ["show", *ZBH1, "--stages", "two"],
        ["plan", *ZBH1],
        ["compare", "--stages", "2"],
        ["train", "--stages", "0"],
    ],
)
def test_bad_flags_leave_with_exit_code_2(capsys, arguments):
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 2
    assert capsys.readouterr().err


def test_exit_codes_of_real_processes(tmp_path):
    done = run("show", *ZBH1, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["mode"] == "ZBH1"
    refused = run("show", str(tmp_path / "missing.json"))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("zbpp: ")
    assert refused.stderr.count("\n") == 1


def test_a_fault_of_ours_is_exit_code_1_with_its_traceback():
    code = (
        "import sys, zbpp.cli\n"
        "zbpp.cli.print_report = lambda *_: 1 / 0\n"
        f"sys.exit(zbpp.cli.main(['show', *{ZBH1}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_a_reader_that_leaves_early_is_no_error():
    command = (
        f"{sys.executable} -m zbpp show ZBV --stages 40 --microbatches 90 | head -1"
    )
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "ZBV: 40 stages, 90 micro-batches\n"


@pytest.mark.parametrize("command", ["plan", "show", "trace", "compare"])
def test_planning_loads_neither_torch_nor_matplotlib(tmp_path, command):
    arguments = {
        "plan": [*ZBH1, "--out", str(tmp_path / "p.json")],
        "show": ZBH1,
        "trace": [*ZBH1, "--out", str(tmp_path / "t.json")],
        "compare": SIZES,
    }[command]
    code = (
        "import sys\n"
        "from zbpp.cli import main\n"
        f"assert main({[command, *arguments]}) == 0\n"
        "loaded = {'torch', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("hidden", ["torch", "zbpp.training.start"])
def test_training_without_torch_says_how_to_get_it(hidden):
    code = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {hidden!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "from zbpp.cli import main\n"
        "sys.exit(main(['train']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    if hidden == "torch":
        assert done.returncode == 2
        assert done.stderr == (
            "zbpp: training needs torch; install it: pip install 'zbpp[train]'\n"
        )
    else:  # any other module that is missing is a fault of ours
        assert (done.returncode, "Traceback" in done.stderr) == (1, True)


def test_the_solver_proves_a_small_plan_optimal(tmp_path, capsys):
    out = tmp_path / "plan.json"
    size = ["--stages", "2", "--microbatches", "4", "--out", str(out)]
    flags = ["--pipeline_schedule_mode", "ZBH1", "--solver", "cpsat", *size]
    assert main(["plan", *flags, "--solver_seconds", "20"]) == 0
    assert "proved optimal (span 13)" in capsys.readouterr().out
    flags = ["--pipeline_schedule_mode", "1F1B", "--solver", "cpsat", *size]
    assert main(["plan", *flags, "--solver_seconds", "0.000001"]) == 0
    assert "above the optimum" in capsys.readouterr().out
    assert read_schedule(out).n_stages == 2


def test_post_validation_is_a_flag_of_three_states():
    name = "enable_optimizer_post_validation"
    for words, value in (
        ([], None),
        ([f"--{name}"], True),
        (["--enable-optimizer-post-validation", "--steps", "3"], True),
        ([f"--no-{name}"], False),
        (["--no_enable_optimizer_post_validation"], False),
        (["--no-enable-optimizer-post-validation"], False),
        ([f"--{name}", "False"], False),
        ([f"--{name}=None"], None),
    ):
        options = tyro.cli(Train, args=_spelled_out(words), use_underscores=True)
        assert options.enable_optimizer_post_validation is value, words
