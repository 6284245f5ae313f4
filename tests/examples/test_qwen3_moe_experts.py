"""The example's Qwen3-MoE on 2 stages x 2 processes, and in one."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from expert_runs import EXAMPLE, example
from pool import Pool

from zbpp.checkpoint import read_model

pytestmark = [pytest.mark.dist, pytest.mark.slow]

TEXT = Path(__file__).parents[2] / "README.md"


@contextmanager
def called_with(*arguments: str) -> Iterator[StringIO]:
    before, sys.argv = sys.argv, [EXAMPLE.name, *arguments]
    try:
        with redirect_stdout(StringIO()) as printed:
            yield printed
    finally:
        sys.argv = before


def run(folder: str, steps: int, mode: str) -> str:
    """What the script prints."""
    arguments = ("--steps", str(steps), "--mode", mode, "--folder", folder)
    with called_with(str(TEXT), *arguments) as printed:
        example().main()
    return printed.getvalue()


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([\d.]+)", text)]


def test_experts_are_dealt_out_and_trained_as_in_one_process(
    tmp_path: Path, pool: Pool
) -> None:
    dealt, whole = str(tmp_path / "dealt"), str(tmp_path / "whole")
    (printed, *others) = pool.run(run, 4, dealt, 4, "ZBV")
    assert others == ["", "", ""]
    expected = losses(run(whole, 4, "ZBH1"))
    assert losses(printed) == pytest.approx(expected, abs=2e-6)
    assert len(expected) == 4 and expected[3] < expected[0]
    plain = read_model(whole)
    for name, value in read_model(dealt).items():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-4)
    # each goes on from the other's checkpoint
    (printed, *_) = pool.run(run, 4, whole, 6, "ZBV")
    assert losses(printed) == pytest.approx(losses(run(dealt, 6, "1F1B")), abs=5e-6)
