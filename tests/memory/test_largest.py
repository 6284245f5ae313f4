"""The largest number whose need is within a limit, found in few steps."""

import math
from collections.abc import Callable

import pytest

from zbpp.memory.api import most_that_fits


def found(
    need: Callable[[int], float], limit: float, first: int = 4
) -> tuple[int, int]:
    asked: list[int] = []

    def noted(n: int) -> float:
        asked.append(n)
        return need(n)

    return most_that_fits(noted, limit, first), len(asked)


@pytest.mark.parametrize("first", [1, 1000])
@pytest.mark.parametrize(
    "need",
    [
        lambda n: 10.0 + 3 * n,
        lambda n: 10.0 + 3 * n + n * n / 50,
        lambda n: 10.0 + 64 * math.ceil(n / 16),
        lambda n: 10.0 + 3 * n if n <= 37 else math.inf,
    ],
)
def test_it_is_what_counting_up_gives(need: Callable[[int], float], first: int) -> None:
    for limit in (9, 12, 13, 99, 300, 301.5):
        counted = 0
        while need(counted + 1) <= limit:
            counted += 1
        assert found(need, limit, first)[0] == counted


def test_straight_lines_take_few_steps() -> None:
    most, steps = found(lambda n: 17.3 + 0.37 * n, 4096)
    assert most == 11023 and steps <= 5


def test_what_never_ends_is_cut_off() -> None:
    assert found(lambda n: 1.0, 2.0)[0] == 2**20
