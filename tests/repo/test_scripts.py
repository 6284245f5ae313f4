"""Notebooks and the scripts of benchmarks/ run, or can at least be loaded."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))

pytestmark = pytest.mark.needs("torch")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_define_nothing_and_have_the_outputs_of_one_run(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in cells:
        tree = ast.parse("".join(cell["source"]))
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        assert not [node for node in ast.walk(tree) if isinstance(node, kinds)]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert "stream" in kinds and "error" not in kinds
    assert path.stat().st_size < 600_000


RUN = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
printed = lambda: "".join(x.get("text", "") for c in cells for x in c.outputs)
before = printed()
nbclient.NotebookClient(notebook, timeout=500).execute()
if sys.argv[2] == "equal":
    assert printed() == before, "run it again, and commit the outputs"
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "path",
    [
        NOTEBOOKS[0],
        *(pytest.param(p, marks=pytest.mark.nightly) for p in NOTEBOOKS[1:]),
    ],
    ids=lambda path: getattr(path, "stem", None),
)
def test_notebooks_run_from_top_to_bottom(path, tmp_path):
    outputs = "measured" if path.stem == "03_run_schedules" else "equal"
    command = [sys.executable, "-c", RUN, str(path), outputs]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=560
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.needs("ortools")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_can_be_loaded(script, monkeypatch):
    for folder in (ROOT / "benchmarks", script.parent):
        monkeypatch.syspath_prepend(folder)
    spec = importlib.util.spec_from_file_location(f"benchmark_{script.stem}", script)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
