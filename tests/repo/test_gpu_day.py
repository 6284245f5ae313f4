"""`make gpu` without a GPU."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_a_gpu_it_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and done.stdout.count("\n") == 1
    assert "no GPU" in done.stdout and not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_the_benchmark_of_a_gpu_day_is_a_command(tmp_path, capsys) -> None:
    from zbpp.cli import main

    _, _, *words = runpy.run_path(str(SCRIPT))["PARTS"]["bench"]
    assert main([*words, "--stages", "1", "--out", str(tmp_path)]) == 2
    assert "a bench of 1 stages" in capsys.readouterr().err  # and no unknown flag
