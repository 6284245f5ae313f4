"""The scripts of benchmarks/ find what they import."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.rglob("*.py"))


@pytest.mark.needs("torch")
@pytest.mark.needs("ortools")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_can_be_loaded(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (BENCHMARKS, script.parent):
        monkeypatch.syspath_prepend(folder)
    spec = importlib.util.spec_from_file_location(f"benchmark_{script.stem}", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
