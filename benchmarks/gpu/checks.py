"""The tests that need a GPU, run by pytest."""

import re
import subprocess
import sys
from pathlib import Path

from gpu.sizes import Sizes
from parts.table import Table

__all__ = ["measure"]

ROOT = Path(__file__).resolve().parents[2]


def measure(sizes: Sizes) -> list[Table]:
    """Count what has passed.

    Raises:
        RuntimeError: a test has failed; its text is pytest's.
    """
    only = ["--collect-only"] if sizes.device.type != "cuda" else []
    # -P: not the zbpp of the checkout, which lacks its schedules; -W: another torch
    # than that of the other tests may warn of something else.
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "-W", "default", "-m", "gpu", *only, "tests/gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if run.returncode != 0:
        raise RuntimeError(run.stdout[-3000:] + run.stderr[-1000:])
    last = run.stdout.strip().splitlines()[-1]
    counts = [[what, int(n)] for n, what in re.findall(r"(\d+)(?:/\d+)? (\w+)", last)]
    note = "`pytest -m gpu tests/gpu`"
    if only:
        note += ", collected and not run: there is no GPU"
    return [Table("Tests that need a GPU", ["outcome", "tests"], counts, note)]
