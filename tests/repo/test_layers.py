"""Tests name what users name, and importing the package loads nothing heavy.

Which room of the package may import which is written in pyproject.toml, and checked by
`lint-imports` in `make check`.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import zbpp

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "src"
INSIDERS = (
    "simgpu",
    "support/runs/training_here.py",  # all stages in one process, as no command does
)
"""Tests that may name what is below the rooms of zbpp."""

SEAM = "zbpp.runtime.testing"


def internals(source: str) -> Iterator[str]:
    """Modules below a room that a test imports, in whatever form."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [x for x in names if _is_module(x)] or [str(node.module)]
        else:
            continue
        for name in names:
            if name.startswith("zbpp.") and name.count(".") > 1 and name != SEAM:
                yield name


def _is_module(name: str) -> bool:
    """A module, and no object of that name that its room exports."""
    room, _, last = name.rpartition(".")
    path = PACKAGE.joinpath(*name.split("."))
    return last not in _exports(room) and (
        path.is_dir() or path.with_suffix(".py").exists()
    )


@cache
def _exports(room: str) -> list[str]:
    path = PACKAGE.joinpath(*room.split("."), "__init__.py")
    for node in ast.parse(path.read_text()).body if path.exists() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def test_tests_name_rooms_and_the_seam_only():
    found = [
        f"{path.relative_to(TESTS)} imports {name}"
        for path in sorted(TESTS.rglob("*.py"))
        if not str(path.relative_to(TESTS)).startswith(INSIDERS)
        for name in internals(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_the_product_does_not_import_the_seam():
    source = Path(zbpp.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in source.rglob("*.py")]
    assert not any(re.search("testing import|import testing", x) for x in texts)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import zbpp.core.clock", "zbpp.core.clock"),
        ("from zbpp.runtime import comm", "zbpp.runtime.comm"),
        ("from zbpp.memory.layers import x", "zbpp.memory.layers"),
        ("def f():\n    from zbpp.runtime.comm.links import P2PLink", None),
    ],
)
def test_a_name_below_a_room_is_found(line, name):
    (found,) = internals(line)
    assert found == (name or "zbpp.runtime.comm.links")
    assert not [*internals("from zbpp.runtime.testing import inject")]
    assert not [*internals("from zbpp.simulator import plot")]


@pytest.mark.needs("matplotlib")
def test_planning_and_simulating_load_neither_torch_nor_matplotlib():
    code = (
        "import sys, zbpp, zbpp.schedules, zbpp.simulator, zbpp.runtime\n"
        "heavy = {'torch', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
    control = run(code.replace("import sys", "import sys, matplotlib"))
    assert "AssertionError: {'matplotlib'}" in control.stderr


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)
