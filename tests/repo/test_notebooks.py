"""The notebooks hold calls only, and run from top to bottom."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


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
@pytest.mark.parametrize(
    "path",
    [*NOTEBOOKS[:2], pytest.param(NOTEBOOKS[2], marks=pytest.mark.nightly)],
    ids=lambda path: path.stem,
)
def test_notebooks_run_from_top_to_bottom(path, tmp_path):
    code = (
        "import sys, nbclient, nbformat\n"
        "notebook = nbformat.read(sys.argv[1], as_version=4)\n"
        "nbclient.NotebookClient(notebook, timeout=500).execute()\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=560
    )
    assert result.returncode == 0, result.stderr[-3000:]
