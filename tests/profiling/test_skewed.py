"""Steps of jobs with skewed times: predicted from means, and short from medians.

Most jobs are about as fast as they can be, some wait for a core, and a few steps hold a
spell in which the machine was elsewhere. The steps are simulated with the drawn times,
so nothing here depends on how busy this machine is.
"""

from collections import defaultdict
from dataclasses import replace
from random import Random
from statistics import fmean, median

import pytest

from zbpp.core import (
    Check,
    ChunkCosts,
    Costs,
    Job,
    Pass,
    Schedule,
    Slot,
    Step,
    Timeline,
)
from zbpp.core.clock import Clock, by_clock
from zbpp.core.measured import measured_costs, robust_mean
from zbpp.planning import plan
from zbpp.profiling.stopwatch import spread
from zbpp.simulator import simulate

LEAST_MS, TAIL_MS = 7.5, 2.4


class Drawn(ChunkCosts):
    """Times of jobs that differ from one to the next, each drawn once."""

    draws: dict[Job, float]

    def of(self, job: Job) -> float:
        if isinstance(job, Step | Check):
            return super().of(job)
        return self.draws[job]


def drawn_step(schedule: Schedule, costs: Costs, rng: Random) -> Timeline:
    times = costs.on(schedule.placement)
    drawn = Drawn(**{name: getattr(times, name) for name in vars(times)})
    object.__setattr__(drawn, "draws", defaultdict(lambda: skewed(rng)))
    clock = Clock(drawn, n_microbatches=schedule.n_microbatches)
    rows = by_clock(schedule.orders, clock)
    return Timeline(
        schedule.name, schedule.placement, schedule.n_microbatches,
        tuple(tuple(Slot(s.job, s.start / 1e3, s.end / 1e3) for s in r) for r in rows),
    )  # fmt: skip


def skewed(rng: Random) -> float:
    return LEAST_MS + rng.expovariate(1 / TAIL_MS)


def makespan(timeline: Timeline) -> float:
    return 1e3 * max(row[-1].end for row in timeline.rows)


@pytest.mark.parametrize("mode", ["ZBH2", "ZBV"])
def test_a_step_of_skewed_jobs_is_predicted_by_means(mode: str) -> None:
    rng = Random(5)
    schedule = plan(mode, n_stages=2, n_microbatches=8)
    comm = Costs(comm=0.4)
    steps = [drawn_step(schedule, comm, rng) for _ in range(40)]
    usual = fmean(map(makespan, steps))
    found = replace(measured_costs(steps), comm=0.4)
    predicted = makespan(in_ms(simulate(schedule, found)))
    assert 0.99 < usual / predicted < 1.05, "waiting for the later of two adds some"
    n = range(schedule.placement.n_chunks)
    halfway = tuple(median(durations(steps, chunk)) for chunk in n)
    short = replace(found, f=halfway, b=halfway, w=halfway)
    by_medians = makespan(in_ms(simulate(schedule, short)))
    assert usual / by_medians > usual / predicted + 0.05, "the control: medians"


def in_ms(timeline: Timeline) -> Timeline:
    return replace(timeline, rows=tuple(
        tuple(Slot(s.job, s.start / 1e3, s.end / 1e3) for s in row)
        for row in timeline.rows
    ))  # fmt: skip


def durations(steps: list[Timeline], chunk: int) -> list[float]:
    return [
        1e3 * slot.duration
        for step in steps
        for row in step.rows
        for slot in row
        if isinstance(slot.job, Pass) and slot.job.chunk == chunk
    ]


@pytest.mark.parametrize("n", [10, 40])
def test_the_mean_keeps_a_tail_and_leaves_spells_out(n: int) -> None:
    rng = Random(n)
    true = LEAST_MS + TAIL_MS
    samples = [[skewed(rng) for _ in range(n)] for _ in range(300)]
    assert fmean(map(robust_mean, samples)) == pytest.approx(true, rel=0.01)
    assert fmean(map(median, samples)) < 0.95 * true, "the control: a median is short"
    spells = [[*one[:-1], 200.0] for one in samples]
    moved = fmean(map(robust_mean, spells))
    assert moved < true * (1 + 2.0 / n), "as far as one far pass"
    assert fmean(map(fmean, spells)) > true + 180 / n, "the control: plain means"


def test_few_or_equal_times_are_their_mean() -> None:
    assert robust_mean([]) == 0.0 and robust_mean([3.0]) == 3.0
    assert robust_mean([1.0, 3.0]) == 2.0
    assert robust_mean([2.0] * 5 + [90.0]) == 2.0


def test_a_report_shows_medians_beside_the_means_that_count() -> None:
    found = spread([1e-3, 1e-3, 1e-3, 2e-3, 5e-3])
    assert (found.median, found.low, found.high) == pytest.approx((1.0, 1.0, 2.0))
    assert found.mean == pytest.approx(2.0)
    assert (found + 1.0).mean == pytest.approx(3.0)
    assert (found + found).median == pytest.approx(2.0)
    assert found.scaled(2.0).mean == pytest.approx(4.0)
