"""Seeds are mixed as they have always been, whatever Python runs."""

import pytest

from zbpp.runtime.support.random_state import mixed_seed, written_out

GOLDEN = {
    (0, 0, 0, 0): 15220518902653198062,
    (3, 1, 2, 5): 15531604019205315563,
    (-1, 0, 7, 31): 11297183286996436349,
    (2**70, 1000, 95, 63): 9193978353917480581,
}


@pytest.mark.parametrize("numbers", GOLDEN)
def test_seeds_of_all_places_are_those_of_golden_values(
    numbers: tuple[int, ...],
) -> None:
    assert mixed_seed(*numbers) == written_out(numbers) == GOLDEN[numbers]
