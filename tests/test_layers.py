"""Imports point down only: every import statement is parsed, none is run.

zbpp.modes, pipeline, training ...        everything below
schedules     simulator     runtime       core
core                                      the standard library
"""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ALLOWED = {
    "zbpp.core": {"zbpp.core"},
    "zbpp.schedules": {"zbpp.schedules", "zbpp.core", "ortools"},
    "zbpp.simulator": {
        *("zbpp.simulator", "zbpp.core"),
        *("numpy", "networkx", "matplotlib"),
    },
    "zbpp.runtime": {"zbpp.runtime", "zbpp.core", "torch"},
}
ONLY_IN = {
    "torch": {"zbpp.runtime", "zbpp.training", "zbpp.pipeline", "zbpp.doctor"},
    "ortools": {"zbpp.schedules.certify"},
    "matplotlib": {"zbpp.simulator.plot", "zbpp.simulator.boxes"},
}


def modules() -> Iterator[tuple[str, Path]]:
    for package in ("zbpp", "zbpp.schedules", "zbpp.simulator"):
        (root,) = importlib.import_module(package).__path__
        for path in sorted(Path(root).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__"), path


def imports(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides its layer"
            if node.module == "zbpp":  # its names may be modules of any layer
                yield from (f"zbpp.{alias.name}" for alias in node.names)
            else:
                yield str(node.module)


def inside(module: str, packages: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in packages)


def breaches(module: str, source: str) -> list[str]:
    layer = next((name for name in ALLOWED if inside(module, {name})), None)
    found = []
    for imported in imports(source):
        top = imported.partition(".")[0]
        below = top in sys.stdlib_module_names or layer is None
        if not (below or inside(imported, ALLOWED[layer])):
            found.append(f"{module} imports {imported}, which is not below {layer}")
        if top in ONLY_IN and not inside(module, ONLY_IN[top]):
            found.append(f"{module} imports {imported}")
    return found


@pytest.mark.parametrize(("module", "path"), list(modules()))
def test_imports_point_down(module, path):
    assert not breaches(module, path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("zbpp.core.jobs", "import numpy"),
        ("zbpp.core.jobs", "from zbpp.schedules import plan_vpp"),
        ("zbpp.core.jobs", "from zbpp import modes"),
        ("zbpp.schedules.vpp", "from zbpp.simulator import simulate"),
        ("zbpp.simulator.engine", "import zbpp.runtime.stage"),
        ("zbpp.runtime.stage", "from zbpp.modes import plan"),
        ("zbpp.runtime.stage", "def late():\n    from zbpp.schedules import lower"),
        ("zbpp.modes", "import torch.nn"),
        ("zbpp.modes", "def late():\n    from torch import nn"),
        ("zbpp.simulator.trace", "def late():\n    import matplotlib"),
    ],
)
def test_an_import_that_points_up_is_found(module, source):
    assert breaches(module, source)


def test_planning_and_simulating_load_neither_torch_nor_matplotlib():
    code = (
        "import sys, zbpp, zbpp.modes, zbpp.schedules, zbpp.simulator\n"
        "heavy = {'torch', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
    control = run(code.replace("import sys", "import sys, matplotlib"))
    assert "AssertionError: {'matplotlib'}" in control.stderr


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
