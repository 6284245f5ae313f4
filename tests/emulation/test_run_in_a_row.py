"""Emulated steps in a row: sums that take their time, and steps that overlap."""

import pytest
import torch
from fake_clock import FakeClock
from pool import Pool

from zbpp.core import Costs, Placement
from zbpp.emulation.network import DelayedTransport
from zbpp.emulation.run import Emulation, emulate
from zbpp.planning import plan
from zbpp.runtime.comm.local import LocalHub

DELAY_MS = 60.0


def transports(reduction: float) -> list[DelayedTransport]:
    times = Costs(reduction=reduction).on(Placement.single(2))
    locals_ = LocalHub(2).transports()
    return [
        DelayedTransport(one, times, stage=stage, slow_sums=True)
        for stage, one in enumerate(locals_)
    ]


def test_a_sum_is_there_when_its_delay_after_the_last_start_is_over(
    clock: FakeClock,
) -> None:
    ends = transports(DELAY_MS)
    first = ends[0].reduce(torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert not first.ready() and not first.done()
    clock.sleep(0.03)
    start = clock.now
    second = ends[1].reduce(torch.tensor([0.0, 0.1], dtype=torch.float64))
    assert first.ready() and not first.done()  # it would come, but not at once
    assert second.result().tolist() == [1.0, 0.1]
    assert DELAY_MS <= (clock.now - start) * 1e3 < DELAY_MS + 0.01
    assert first.done() and first.result().tolist() == [1.0, 0.1]


def test_without_a_delay_a_sum_is_there_at_once(clock: FakeClock) -> None:
    ends = transports(0.0)
    sums = [end.reduce(torch.ones(1, dtype=torch.float64)) for end in ends]
    start = clock.now
    assert [float(one.result()) for one in sums] == [2.0, 2.0]
    assert (clock.now - start) * 1e3 < 0.1


def measured(validated: bool) -> dict[str, object]:
    """Two stages, three micro-batches, jobs and optimizer of 30 ms."""
    schedule = plan("ZBH2", n_stages=2, n_microbatches=3)
    costs = Costs(30, 30, 30, optimizer=30, reduction=20)
    return emulate(schedule, costs, n_steps=5, post_validation=validated).as_dict()


@pytest.mark.slow
@pytest.mark.dist
def test_steps_in_a_row_take_no_less_than_simulated(pool: Pool) -> None:
    """10 jobs, and 11 jobs with the sum; `benchmarks/` measures what is gained."""
    for validated, simulated in ((True, 300), (False, 350)):
        outcome, other = pool.run(measured, 2, validated)
        assert outcome == other  # the ends of all stages count
        assert outcome["simulated_step_ms"] == pytest.approx(simulated)
        assert outcome["post_validation"] is validated
        assert float(str(outcome["step_ms"])) >= simulated - 1


def test_an_outcome_says_how_it_was_measured() -> None:
    schedule = plan("ZBH2", n_stages=2, n_microbatches=3)
    numbers = (schedule, 5, 310.0, 300.0, 0.0, 0.0)
    assert Emulation(*numbers).as_dict()["post_validation"] is None
