"""A script beside a checkout named zbpp, where Python could take it for the package."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", [".", "zbpp"], ids=["beside", "inside"])
def test_a_script_finds_the_package(tmp_path, folder):
    (tmp_path / "zbpp").symlink_to(ROOT)
    script = (
        "import zbpp, zbpp.schedules, zbpp.simulator\n"
        "print(zbpp.plan('ZBV', n_stages=2, n_microbatches=2).name)\n"
    )
    done = subprocess.run(  # -c, as a script in its folder: sys.path begins with it
        [sys.executable, "-c", script],
        cwd=tmp_path / folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    hint = "pip install -e . again, if an older checkout was installed"
    assert done.stdout == "ZBV\n", f"{done.stderr}\n{hint}"
