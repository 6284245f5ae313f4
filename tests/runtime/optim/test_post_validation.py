"""Speculative steps leave the bits of steps behind a barrier."""

import pytest
from histories import History, compare, draw, run, vary
from outcomes import difference

from zbpp.runtime.testing import small_buckets

# of histories that step matrices alone
pytestmark = pytest.mark.filterwarnings("ignore:.*no optimizer steps them:UserWarning")


def check(seeds: range) -> int:
    """Compare the histories of some seeds; return how many steps were rolled back."""
    rollbacks = 0
    for seed in seeds:
        history = vary(draw(seed))
        found, ours = compare(history)
        assert found is None, f"{found}\n{history}"
        rollbacks += sum(ours.rollbacks)
    return rollbacks


def test_random_histories() -> None:
    assert check(range(10)) > 10


@pytest.mark.slow
@pytest.mark.nightly
def test_more_random_histories() -> None:
    assert check(range(10, 60)) > 50


def compare_unseeded(history: History) -> str | None:
    with small_buckets():
        ours = run(history, history.n_stages, post_validation=True, seed=None)
    theirs = run(history, history.n_stages, post_validation=False, seed=None)
    return difference(ours, theirs)


@pytest.mark.parametrize("seed", range(6))
def test_torchs_own_random_numbers_are_replayed(seed: int) -> None:
    """Dropout without seeds of its own: all stages share one generator."""
    assert compare_unseeded(draw(seed, dropout=0.3)) is None
