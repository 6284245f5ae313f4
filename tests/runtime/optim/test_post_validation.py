"""Speculative steps leave the bits of steps behind a barrier."""

from contextlib import nullcontext

import pytest
import torch
from histories import ALWAYS, INF, SPIKE, History, compare, draw, run, vary
from moments import small_buckets, uncertain_sums
from outcomes import difference

from zbpp.runtime.replay import Replay


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def check(seeds: range) -> int:
    """Compare the histories of some seeds; return how many steps were rolled back."""
    rollbacks = 0
    for seed in seeds:
        history = vary(draw(seed))
        found, ours = compare(history)
        assert found is None, f"{found}\n{history}"
        rollbacks += sum(ours.rollbacks)
    return rollbacks


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (20, 40))]
)
def test_random_histories(first: int) -> None:
    assert check(range(first, first + 20)) > 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(60, 1000, 94))
def test_a_thousand_random_histories(first: int) -> None:
    assert check(range(first, first + 94)) > 94


def compare_unseeded(history: History) -> str | None:
    with uncertain_sums(history.seed), small_buckets():
        ours = run(history, history.n_stages, post_validation=True, seed=None)
    theirs = run(history, history.n_stages, post_validation=False, seed=None)
    return difference(ours, theirs)


@pytest.mark.parametrize("seed", range(12))
def test_torchs_own_random_numbers_are_replayed(seed: int) -> None:
    """Dropout without seeds of its own: all stages share one generator."""
    assert compare_unseeded(draw(seed, dropout=0.3)) is None


def test_other_random_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    events = (None, SPIKE, INF, None)
    history = draw(
        1, dropout=0.3, n_stages=3, events=events, looks=("",) * 4, patience=ALWAYS
    )
    assert compare_unseeded(history) is None
    monkeypatch.setattr(Replay, "forward", lambda self, job: nullcontext())
    assert compare_unseeded(history) is not None
