"""The words of `zbpp plan` on plans that take long."""

import time

import pytest

from zbpp.cli import main
from zbpp.cli.plan import gain_line, waiting_line
from zbpp.schedules.planner.budget import Budget


def test_long_plans_are_announced_and_short_ones_are_not() -> None:
    assert waiting_line(1000, 2, "default") is None
    assert waiting_line(2**24, 1, "fast") is not None
    assert "effort fast takes a third" in str(waiting_line(2**24, 2, "default"))


@pytest.mark.parametrize(
    ("mode", "n_jobs"), [("zb-h1", 24), ("ZB2P", 24), ("1F1B", 24), ("v-half", 48)]
)
def test_jobs_are_counted_by_the_chunks_of_the_mode(
    tmp_path, capsys, mode, n_jobs
) -> None:
    flags = ("--stages", "2", "--microbatches", "4", "--out", str(tmp_path / "x.json"))
    effort = ("--effort", "best:0.01")
    assert main(["plan", "--pipeline_schedule_mode", mode, *flags, *effort]) == 0
    assert f"planning {n_jobs} jobs" in capsys.readouterr().err


def test_best_says_what_it_was_good_for(tmp_path, capsys) -> None:
    flags = ("--stages", "3", "--microbatches", "4", "--out", str(tmp_path / "x.json"))
    flags += ("--pipeline_schedule_mode", "ZBV", "--effort", "best:0.01")
    assert main(["plan", *flags]) == 0
    said = capsys.readouterr()
    assert "planning 72 jobs, 0.01 s of CPU time" in said.err
    assert "best:0.01: span 12.5, nothing shorter" in said.out
    assert "2.00% shorter" in gain_line(98.0, 100.0, "best:1")  # the control


def test_seconds_are_those_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on the wall may go on as it likes."""
    budget = Budget(10.0, seconds=5.0)
    start = time.thread_time()
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)
    assert budget.is_left
    monkeypatch.setattr(time, "thread_time", lambda: start + 6.0)
    assert not budget.is_left and budget.seconds_left == 0
