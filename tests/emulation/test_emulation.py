"""Emulated runs: a schedule takes no less than simulated, and no more by a clock."""

import time
from typing import Any

import pytest
from pool import Pool

import zbpp
from zbpp.core import Costs
from zbpp.emulation import emulate


class Clock:
    """Time goes by only in sleeps, with a factor for each of the first steps.

    Args:
        factors: by step; the last one stays.
        n_sleeps: in a step.
    """

    def __init__(self, factors: list[float], n_sleeps: int) -> None:
        self.now, self.n, self.n_sleeps, self.factors = 1e3, 0, n_sleeps, factors

    def read(self) -> float:
        self.now += 2.0**-20  # a loop that waits for a time comes to its end
        return self.now

    def sleep(self, seconds: float) -> None:
        step = min(self.n // self.n_sleeps, len(self.factors) - 1)
        self.now += seconds * self.factors[step]
        self.n += 1


@pytest.mark.parametrize(
    ("factors", "expected"), [([1.0], 1.0), ([5.0, 4.0, 1.0, 3.0, 2.0], 2.0)]
)
def test_a_run_of_one_stage_takes_what_is_simulated_but_for_its_first_steps(
    factors: list[float], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The median of three steps behind two that are not counted."""
    clock = Clock(factors, n_sleeps=4)  # F, B, W and the optimizer
    monkeypatch.setattr(time, "perf_counter", clock.read)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    schedule = zbpp.plan("ZBH1", n_stages=1, n_microbatches=1)
    costs = Costs(1000, 2000, 3000, optimizer=4000)
    outcome = emulate(schedule, costs, n_steps=3)
    assert outcome.simulated_step_ms == pytest.approx(10_000)
    assert outcome.step_ms == pytest.approx(expected * 10_000, rel=1e-2)
    assert outcome.as_dict()["post_validation"] is None


CASES = [
    # one step at a time: links and a loss show in the simulated step, 300 without them
    ("ZBH1", 3, {"comm": 60, "loss": 10, "splits": (True, False)}, None, 1.2 * 250),
    # in a row: 10 jobs of 30 ms, and 11 with the sum
    ("ZBH2", 3, {"optimizer": 30, "reduction": 20}, True, 300),
    ("ZBH2", 3, {"optimizer": 30, "reduction": 20}, False, 350),
]


def measured(case: tuple[Any, ...]) -> dict[str, object]:
    mode, m, more, post_validation, _ = case
    costs = Costs(*(20, 20, 20) if post_validation is None else (30, 30, 30), **more)
    schedule = zbpp.plan(mode, n_stages=2, n_microbatches=m, costs=costs)
    outcome = emulate(schedule, costs, n_steps=4, post_validation=post_validation)
    return outcome.as_dict()


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_two_processes_take_no_less_than_simulated(case: Any, pool: Pool) -> None:
    """However busy the machine is."""
    first, second = pool.run(measured, 2, case)
    *_, post_validation, least = case
    for found in (first, second):
        assert float(found["simulated_step_ms"]) >= least - 1e-6
        assert float(found["step_ms"]) >= float(found["simulated_step_ms"]) - 1
        assert found["post_validation"] is post_validation
    assert first == second or post_validation is None  # the ends of all stages count
