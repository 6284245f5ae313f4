"""The zbpp command where something is wrong or missing, and its exit codes."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
from commands import SIZES, ZBH1, run

from zbpp.cli import doctor, main


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


def test_doctor_tells_what_no_test_has_run_on(monkeypatch):
    line = next(line for line in doctor.report_lines() if line.startswith("python"))
    assert "not tested" not in line
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.99.1")
    line = next(line for line in doctor.report_lines() if line.startswith("python"))
    assert line.startswith("python         3.99.1 (")
    assert line.endswith("; not tested: 3.11, 3.12, 3.13 are")


@pytest.mark.parametrize("mode", ["1F1B", "VPP", "ZBH1", "ZBV", "ZBVPP", "auto"])
def test_sizes_that_would_take_hours_are_refused_with_the_number_of_jobs(capsys, mode):
    each = 2 if mode in ("VPP", "ZBV", "ZBVPP") else 1
    many = ["--stages", "1000000", "--microbatches", "1000000"]
    assert main(["show", mode, *many]) == 2
    error = capsys.readouterr().err
    assert f"are {3 * each},000,000,000,000 jobs (F, B and W of each" in error
    assert "at most 16,777,216 are planned" in error and error.count("\n") == 1
    assert main(["show", mode, "--stages", "1000000", "--microbatches", "1"]) == 2
    assert f"are {each},000,000 chunks; at most 8,192 are" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["1F1B", "ZBH1", "ZBV", "auto"])
@pytest.mark.parametrize(
    "key", ["f", "b", "w", "comm", "optimizer", "loss", "reduction", "m_b"]
)
@pytest.mark.parametrize("value", [1e308, 1e101])
def test_numbers_whose_sums_overflow_are_refused(tmp_path, capsys, mode, key, value):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({key: value}))
    assert main(["show", mode, *SIZES, "--costs", str(path)]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"zbpp: {path}: {key} is {value!r}; take another unit: it must be 0, or at "
        "least 1e-100 and at most 1e+100\n"
    )


@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
@pytest.mark.parametrize(
    "costs",
    [{"f": 1e100, "b": 1e100}, {"optimizer": 1e16}, {"w": 1e-100}, {"m_b": 1e100}],
)
def test_numbers_far_apart_are_shown_without_a_picture_of_them(
    tmp_path, capsys, mode, costs
):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs))
    assert main(["show", mode, *SIZES, "--costs", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "nan" not in shown and "bubble rate" in shown
    assert ("(no picture: the longest job takes 1e+16" in shown) == (
        "optimizer" in costs
    )


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
        "import sys, zbpp.cli.commands\n"
        "zbpp.cli.commands.print_report = lambda *_, **__: 1 / 0\n"
        f"sys.exit(zbpp.cli.commands.main(['show', *{ZBH1}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_a_closed_output_is_no_error():
    words = [sys.executable, "-m", "zbpp", "show", *ZBH1]
    command = ["bash", "-c", '"$@" >&-', "bash", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [["compare", *SIZES], ["plan", "--help"]])
def test_a_reader_that_has_left_before_anything_is_printed_is_no_error(words):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "zbpp", *words]
    with os.fdopen(writing) as pipe:
        done = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=200
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_leaves_early_is_no_error():
    command = (
        f"{sys.executable} -m zbpp show 1F1B --stages 40 --microbatches 90 | head -1"
    )
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1F1B: 40 stages, 90 micro-batches\n"


def test_a_full_disk_is_told_in_a_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "zbpp", "show", *ZBH1],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=200,
        )  # fmt: skip
    assert done.returncode == 1
    assert re.fullmatch(r"zbpp: the output is lost: .*No space left.*\n", done.stderr)


def test_planning_loads_neither_torch_nor_matplotlib(tmp_path):
    commands = [
        ["plan", *ZBH1, "--out", str(tmp_path / "p.json")],
        ["show", *ZBH1],
        ["show", *ZBH1, "--out", str(tmp_path / "t.json")],
        ["compare", *SIZES],
    ]
    code = (
        "import sys\n"
        "from zbpp.cli.commands import main\n"
        f"for command in {commands}:\n"
        "    assert main(command) == 0\n"
        "    loaded = {'torch', 'matplotlib'} & set(sys.modules)\n"
        "    assert not loaded, (command, loaded)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.needs("torch")
@pytest.mark.parametrize("hidden", ["torch", "zbpp.training.start"])
def test_training_without_torch_says_how_to_get_it(hidden):
    code = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {hidden!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "from zbpp.cli.commands import main\n"
        "sys.exit(main(['train']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200
    )
    if hidden == "torch":
        assert done.returncode == 2
        assert done.stderr == (
            "zbpp: this needs torch; install it: pip install 'zbpp[train]'\n"
        )
    else:  # any other module that is missing is a fault of ours
        assert (done.returncode, "Traceback" in done.stderr) == (1, True)
