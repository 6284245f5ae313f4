"""Means and quartiles of skewed times: most are short, some wait for a core."""

from random import Random
from statistics import fmean, median

import pytest

from zbpp.core.measured import robust_mean
from zbpp.profiling.stopwatch import spread

LEAST_MS, TAIL_MS = 7.5, 2.4


def skewed(rng: Random) -> float:
    return LEAST_MS + rng.expovariate(1 / TAIL_MS)


def test_the_mean_keeps_a_tail_and_leaves_spells_out() -> None:
    n, rng = 10, Random(10)
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
