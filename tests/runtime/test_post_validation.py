"""Early steps that are validated later leave the bits of steps behind a barrier."""

import pytest
import torch
from histories import (
    compare,
    draw,
)

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def check(seeds: range) -> int:
    """Compare the histories of some seeds; return how many steps were taken back."""
    rollbacks = 0
    for seed in seeds:
        history = draw(seed)
        found, ours = compare(history)
        assert found is None, f"{found}\n{history}"
        rollbacks += sum(ours.rollbacks)
    return rollbacks


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_histories(first: int) -> None:
    assert check(range(first, first + 20)) > 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(60, 1000, 94))
def test_a_thousand_random_histories(first: int) -> None:
    assert check(range(first, first + 94)) > 94
