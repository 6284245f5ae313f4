"""What the documents say runs: commands, examples, the picture, the notebooks."""

import ast
import doctest
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zbpp.cli.commands import main
from zbpp.core import parse_costs
from zbpp.modes import MODES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SCRIPT = "my_train.py"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def commands(program: str) -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [rest for first, *rest in words if first == program]


def script() -> str:
    (found,) = [text for text in blocks("python") if ">>>" not in text]
    return found


@pytest.fixture
def in_tmp(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def restored_threads() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# The README's commands.


def test_every_command_is_of_a_kind_that_is_tested():
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    programs = {shlex.split(line)[0] for line in lines}
    assert programs == {"make", "python3.11", "pip", "zbpp", "torchrun", "python"}


def test_the_planning_commands_run_in_their_order(in_tmp, capsys):
    found = commands("zbpp")
    assert [name for name, *_ in found] == ["plan", "show", "plot", "compare"]
    for arguments in found:
        assert main(arguments) == 0, capsys.readouterr().err
        assert capsys.readouterr().out
    made = {path.name for path in in_tmp.iterdir()}
    assert made == {"plan.json", "torch.csv", "timeline.svg"}


def test_the_make_targets_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = [arguments[0] for arguments in commands("make")]
    assert named == ["train", "test"]
    assert set(named) <= set(targets)


@pytest.mark.slow
@pytest.mark.dist
def test_the_flags_that_make_hands_on_train(in_tmp):
    (flags,) = re.findall(r'`make train ARGS="(.*?)"`', README)
    tiny = "--steps 2 --seq 16 --dim 16 --n_blocks 6 --hidden 16 --n_heads 2"
    command = [sys.executable, "-m", "zbpp", "train", *flags.split(), *tiny.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    assert "ZBV, 4 stages in 4 process(es)" in result.stdout
    assert "parameters sha256:" in result.stdout


def test_the_packages_that_pip_is_told_to_install_exist():
    (given, *_) = commands("pip")
    assert given[:3] == ["install", "-c", "constraints/cpu.txt"]
    assert (ROOT / "constraints/cpu.txt").exists()
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(re.findall(r"\.\[(.*?)\]", README)[0].split(","))
    assert extras == {"train", "viz"} <= set(project["optional-dependencies"])


# The README's examples.


def test_the_example_session():
    (text,) = [text for text in blocks("python") if ">>>" in text]
    test = doctest.DocTestParser().get_doctest(text, {}, "README", "README.md", 0)
    assert len(test.examples) > 5
    assert doctest.DocTestRunner().run(test).failed == 0


def run_script(path: Path, capsys, monkeypatch, *arguments: str) -> list[str]:
    monkeypatch.setattr(sys, "argv", [path.name, *arguments])
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_the_users_script_prints_the_same_whatever_the_flag(
    in_tmp, capsys, monkeypatch, restored_threads
):
    path = in_tmp / SCRIPT
    path.write_text(script())
    (in_readme,) = [words for first, *words in commands("python") if first == SCRIPT]
    printed = run_script(path, capsys, monkeypatch, *in_readme)
    assert len(printed) == 4
    assert loss_of(printed[-1]) < 0.9 * loss_of(printed[0])
    for mode in ("ZBH1", "ZBV"):
        flags = ("--pipeline_schedule_mode", mode, "--stages", "2")
        assert run_script(path, capsys, monkeypatch, *flags) == printed


def loss_of(line: str) -> float:
    return float(line.split()[3])


@pytest.mark.slow
@pytest.mark.dist
def test_the_users_script_prints_the_same_under_torchrun(in_tmp):
    (in_tmp / SCRIPT).write_text(script())
    (arguments,) = commands("torchrun")
    (in_readme,) = [words for words in commands("python") if words[0] == SCRIPT]
    outputs = [
        subprocess.run(command, capture_output=True, text=True, timeout=200)
        for command in (
            [sys.executable, "-m", "torch.distributed.run", *arguments],
            [sys.executable, *in_readme],
        )
    ]
    assert [output.returncode for output in outputs] == [0, 0], outputs
    assert outputs[0].stdout == outputs[1].stdout
    assert outputs[0].stdout.startswith("step 5  loss ")


def test_the_costs_that_are_shown_are_valid():
    (text,) = re.findall(r'`(\{"f".*?\})`', README)
    costs, memory = parse_costs(text)
    assert (costs.f, memory.m_w) == (18.5, 0.37)


def test_the_iterations_that_are_shown_are_what_the_command_draws(capsys):
    (text,) = blocks("text")
    command, *drawn = text.splitlines()
    program, *arguments = shlex.split(command.removeprefix("$ "))
    assert program == "zbpp" and main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1 : 1 + len(drawn)] == drawn
    assert any(re.match("steady step +9 .*, 10 behind", line) for line in printed)


def test_the_table_names_modes():
    rows = re.findall(r"^\| `(\w+)`", README, re.MULTILINE)
    assert len(rows) >= 6
    assert set(rows) <= set(MODES)


# The picture, the paths, the notebooks.


def test_the_picture_can_be_made_again(tmp_path):
    copy = tmp_path / "make_picture.py"
    copy.write_text((ROOT / "docs" / "make_picture.py").read_text())
    runpy.run_path(str(copy))
    drawn = (tmp_path / "schedules.svg").read_text()
    kept = (ROOT / "docs" / "schedules.svg").read_text()
    for text in ("1F1B", "ZBH1", "ZBV", "27.27 %", "11.11 %", "0.00 %"):
        assert text in drawn
        assert text in kept


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_are_named_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    linked = re.findall(r"\]\((?!http)([^)#]+)", text)
    folders = "docs|tests|zbpp|schedules|simulator|benchmarks|notebooks|constraints"
    quoted = re.findall(rf"`((?:{folders})/[\w./-]*)`", text)
    missing = [
        name
        for name in linked + quoted
        if not any((folder / name).exists() for folder in (ROOT, (ROOT / page).parent))
    ]
    assert not missing


def cells(path: Path) -> list[dict]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_hold_calls_only_and_no_outputs(path):
    for cell in cells(path):
        assert not cell["outputs"]
        assert cell["execution_count"] is None
        tree = ast.parse("".join(cell["source"]))
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        assert not [node for node in ast.walk(tree) if isinstance(node, kinds)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_from_top_to_bottom(path, tmp_path):
    code = (
        "import sys, nbclient, nbformat\n"
        "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
        "nbclient.NotebookClient(notebook, timeout=400).execute()\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert result.returncode == 0, result.stderr[-3000:]
