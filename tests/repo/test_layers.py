"""Planning and simulating load nothing heavy; pyproject.toml has the layers.

`lint-imports` in `make check` checks which room of the package imports which.
"""

import subprocess
import sys

import pytest


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
