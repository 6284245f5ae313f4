"""Means and quartiles of times.

A step is a sum of passes, so its expectation follows from the mean of each pass's
time. These times are skewed: most passes are about as fast as the machine can be, and
some wait for a core. A median leaves these out, and steps are then predicted short.
"""

from collections.abc import Sequence
from statistics import fmean, quantiles
from typing import NamedTuple

_FAR = 5.0
"""Quartile ranges above the upper quartile; exponential times lose .2 % there."""


class Spread(NamedTuple):
    """Quartiles of some times, and the mean that costs are made of."""

    low: float
    median: float
    high: float
    mean: float


def spread(times: Sequence[float]) -> Spread:
    """Quartiles and mean of times, where those that are far out count as no more.

    Far is five quartile ranges above the upper quartile (Tukey's far out is three): a
    tail of slow passes counts, and a spell in which the machine was elsewhere hardly
    does. There must be one.

    >>> spread([1.0, 2.0, 3.0, 4.0, 100.0])
    Spread(low=2.0, median=3.0, high=4.0, mean=4.8)
    """
    several = times if len(times) > 1 else [*times, *times]
    low, median, high = quantiles(several, method="inclusive")
    far = high + _FAR * (high - low)
    return Spread(low, median, high, fmean(min(time, far) for time in times))


def robust_mean(times: Sequence[float]) -> float:
    """Mean of `spread`; of nothing 0."""
    return spread(times).mean if times else 0.0
