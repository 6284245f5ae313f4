"""Emulated runs: a step takes no less than simulated, and no more by a clock."""

import time
from typing import Any

import pytest
from pool import Pool

import zbpp
from zbpp.core import Costs
from zbpp.emulation import emulated_batch, emulated_pipeline
from zbpp.simulator import simulate, steady_step_time, step_time


class Clock:
    """Time goes by only in sleeps, but for what a look at the clock takes."""

    def __init__(self) -> None:
        self.now = 1e3

    def read(self) -> float:
        self.now += 2.0**-20  # a loop that waits for a time comes to its end
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_step_of_one_stage_takes_what_is_simulated(monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.read)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    schedule = zbpp.plan("ZBH1", n_stages=1, n_microbatches=2)
    costs = Costs(1000, 2000, 3000, optimizer=4000)
    with emulated_pipeline(schedule, costs) as pipeline:
        batch = emulated_batch(pipeline)
        for _ in range(2):
            start = clock.now
            pipeline.step(batch, batch)
            assert clock.now - start == pytest.approx(16, rel=1e-2)
    assert step_time(simulate(schedule, costs)) == pytest.approx(16_000)


@pytest.mark.parametrize("mode", ["ZBV", "ZBH1", "VPP"])
def test_copies_to_the_host_take_what_is_simulated(monkeypatch, mode: str) -> None:
    """They overlap with passes, where there are any."""
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.read)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    costs = Costs(1000, 1000, 1000, optimizer=2000, all_gather=600, reduce_scatter=700)
    schedule = zbpp.plan(mode, n_stages=1, n_microbatches=3)
    with emulated_pipeline(schedule, costs, offload_optimizer=True) as pipeline:
        batch = emulated_batch(pipeline)
        for _ in range(3):
            start = clock.now
            pipeline.step(batch, batch)
            took = (clock.now - start) * 1e3
        planned = steady_step_time(pipeline.schedule, costs)
    assert took == pytest.approx(planned, rel=0.03)
    assert planned > 9000 + 2000, "some of the copies shows"
    hidden = 9000 + 2000 + 600 + 700 - planned
    assert (hidden > 100) == (mode != "ZBH1"), "one chunk has no passes to overlap with"


CASES = [
    # one step at a time: links and a loss show in the simulated step, 300 without them
    ("ZBH1", 3, {"comm": 60, "loss": 10, "splits": (True, False)}, None, 1.2 * 250),
    # in a row: 10 jobs of 30 ms, and 11 with the sum
    ("ZBH2", 3, {"optimizer": 30, "reduction": 20}, True, 300),
    ("ZBH2", 3, {"optimizer": 30, "reduction": 20}, False, 350),
    # the optimizer on the host: copies of one chunk during passes of the other
    ("ZBV", 3, {"optimizer": 30, "all_gather": 20, "reduce_scatter": 20}, False, 300),
]


def measured(case: tuple[Any, ...]) -> tuple[float, float]:
    """Mean time of a step in ms, measured and simulated."""
    mode, m, more, post_validation, _ = case
    costs = Costs(*(20, 20, 20) if post_validation is None else (30, 30, 30), **more)
    schedule = zbpp.plan(mode, n_stages=2, n_microbatches=m, costs=costs)
    how = {
        "post_validation": post_validation,
        "offload_optimizer": "all_gather" in more,
    }
    with emulated_pipeline(schedule, costs, **how) as run:
        batch = emulated_batch(run)
        times = []
        for step in range(9):
            if post_validation is None or step == 4:
                run.gather(None)  # all ranks start together
            times.append(time.perf_counter())
            run.step(batch, batch)
            times.append(max(run.gather(time.perf_counter())))
        if post_validation is None:
            took = min(b - a for a, b in zip(times[::2], times[1::2], strict=True))
            return took * 1e3, step_time(simulate(run.schedule, costs))
        took = (times[-1] - times[9]) / 4
        return took * 1e3, steady_step_time(run.schedule, costs)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_two_processes_take_no_less_than_simulated(case: Any, pool: Pool) -> None:
    """However busy the machine is."""
    *_, least = case
    for step_ms, simulated_ms in pool.run(measured, 2, case):
        assert simulated_ms >= least - 1e-6
        assert step_ms >= simulated_ms - 1
