"""Times and memories as whole numbers, which the solver needs."""

from fractions import Fraction
from math import lcm

from zbpp.core import RequestError

__all__ = ["LARGEST_MEMORY", "exact", "scale_of"]

LARGEST = 2**40  # sums of times in the solver stay far below 2**63
LARGEST_MEMORY = 2**55  # bytes of GPUs, thousands of times


def exact(number: float) -> Fraction:
    """A number as it was written: sums such as B + W have digits from rounding."""
    return Fraction(f"{number:.12g}")


def scale_of(numbers: list[Fraction], largest: int = LARGEST) -> int:
    """The factor that makes all numbers whole.

    Raises:
        RequestError: they have too many digits for the solver.
    """
    scale = lcm(*(number.denominator for number in numbers))
    if max(numbers, default=Fraction(0)) * scale * len(numbers) > largest:
        raise RequestError(
            "the costs have too many digits for the solver; round them to six or so"
        )
    return scale
