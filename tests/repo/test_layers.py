"""Tests name what users name, and importing the package loads nothing heavy.

Which room of the package may import which is written in pyproject.toml, and checked by
`lint-imports` in `make check`.
"""

import re
import subprocess
import sys
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


def internals(source: str) -> list[str]:
    """Modules below a room that a test imports; objects of a room are no modules."""
    modules = re.findall(r"^ *(?:from|import) (zbpp(?:\.\w+)+)", source, re.MULTILINE)
    of_rooms = re.findall(r"^ *from (zbpp\.\w+) import (\w+)", source, re.MULTILINE)
    modules += [f"{room}.{name}" for room, name in of_rooms if _is_module(room, name)]
    return [x for x in modules if x.count(".") > 1 and x != SEAM]


def _is_module(room: str, name: str) -> bool:
    folder = PACKAGE.joinpath(*room.split("."))
    if not ((folder / name).is_dir() or (folder / f"{name}.py").exists()):
        return False
    exports = (folder / "__init__.py").read_text(encoding="utf-8")  # needs no torch
    return f'"{name}"' not in exports


def test_tests_import_public_packages_and_the_test_interface_only():
    found = [
        f"{path.relative_to(TESTS)} imports {name}"
        for path in sorted(TESTS.rglob("*.py"))
        if not str(path.relative_to(TESTS)).startswith(INSIDERS)
        for name in internals(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_the_package_does_not_import_the_test_interface():
    source = Path(zbpp.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in source.rglob("*.py")]
    assert not any(re.search("testing import|import testing", x) for x in texts)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import zbpp.core.clock", "zbpp.core.clock"),
        ("from zbpp.runtime import comm", "zbpp.runtime.comm"),
        ("from zbpp.memory.layers import x", "zbpp.memory.layers"),
        ("def f():\n    from zbpp.core.clock import P2P", "zbpp.core.clock"),
    ],
)
def test_an_import_below_a_public_package_is_found(line, name):
    assert internals(line) == [name]
    assert not internals("from zbpp.runtime.testing import inject")
    assert not internals("from zbpp.simulator import plot")


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
