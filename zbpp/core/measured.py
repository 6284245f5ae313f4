"""Means of what a run has measured, so that the next plan is made for them.

A step is a sum of passes, so its expectation follows from the mean of each pass's
time. These times are skewed: most passes are about as fast as the machine can be, and
some wait for a core. A median leaves these out, and steps are then predicted short.
"""

from collections.abc import Sequence
from statistics import fmean, quantiles

__all__ = ["not_told_apart", "robust_mean"]

_FAR = 5.0
"""Quartile ranges above the upper quartile; exponential times lose .2 % there."""


def robust_mean(values: Sequence[float]) -> float:
    """Mean of times, where those that are far out count as no more than far.

    Far is five quartile ranges above the upper quartile (Tukey's far out is three): a
    tail of slow passes counts, and a spell in which the machine was elsewhere hardly
    does. Nothing gives 0.

    >>> robust_mean([1.0, 2.0, 3.0, 4.0, 100.0])
    4.8
    """
    if len(values) < 2:
        return values[0] if values else 0.0
    low, _, high = quantiles(values, method="inclusive")
    far = high + _FAR * (high - low)
    return fmean(min(value, far) for value in values)


def not_told_apart(name: str) -> str:
    """Say why a schedule with BW passes cannot be measured, and what to do."""
    return (
        f"{name} runs B and W as one pass, so their times cannot be told apart; "
        "measure with a mode that splits them, such as ZBH1"
    )
