"""Experts over ``ep``, slices over ``cp``: as in one process, to the bit over modes."""

from typing import Any

import pytest
import torch
from expert_runs import (
    BREAKS,
    N_STEPS,
    Found,
    train_all,
    train_plainly,
)
from pool import Pool

pytestmark = pytest.mark.dist

MODES = ("1F1B", "ZBH1", "ZBV", "VPP", "DualPipeV")
EP, CP = {"expert_parallel": 2}, {"context_parallel": 2}
DP_EP = {"data_parallel": 2, **EP}

Case = tuple[str, dict[str, int], dict[str, Any]]


def assert_right(runs: list[list[Found]], steps: int) -> None:
    """Every run is the plain loop's to 1e-9 in 64 bits, and all have the same bits."""
    plain = train_plainly(steps)
    assert 2 <= plain.rollbacks < steps
    first: dict[str, torch.Tensor] = {}
    for at_rank in runs:
        for found in at_rank:
            assert found.losses == pytest.approx(plain.losses, rel=1e-9)
            assert found.norms == pytest.approx(plain.norms, rel=1e-9)
            assert found.validation == pytest.approx(plain.validation, rel=1e-9)
            assert found.rollbacks == plain.rollbacks
            assert found.losses == runs[0][0].losses
            assert found.norms == runs[0][0].norms
            for name, value in found.parameters.items():
                expected = plain.parameters[name]
                torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
                assert torch.equal(value, first.setdefault(name, value)), name
    assert first.keys() == plain.parameters.keys()


def cases(modes: tuple[str, ...], sizes: dict[str, int], **how: Any) -> list[Case]:
    return [(mode, sizes, how) for mode in modes]


@pytest.mark.parametrize("sizes", [EP, CP])
def test_two_stages_on_four_processes(sizes: dict[str, int], pool: Pool) -> None:
    assert_right(pool.run(train_all, 4, cases(("ZBV",), sizes, steps=5)), 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "n"), [(EP, 4), (CP, 4), (DP_EP, 8), ({**CP, **EP}, 8)]
)
def test_every_mode_for_twenty_steps(sizes: dict[str, int], n: int, pool: Pool) -> None:
    assert_right(pool.run(train_all, n, cases(MODES, sizes)), N_STEPS)


@pytest.mark.slow
def test_experts_as_dtensors(pool: Pool) -> None:
    more = cases(("ZBV", "1F1B"), DP_EP, steps=5, dtensors=True)
    assert_right(pool.run(train_all, 8, more), 5)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("sizes", [DP_EP, {**CP, **EP}])
def test_shards_of_experts_and_of_the_rest(
    sizes: dict[str, int], shard: str, pool: Pool
) -> None:
    """The rest is dealt out over all that sum it, experts over those that share them."""
    more = cases(("ZBV", "1F1B"), sizes, steps=5, shard=shard)
    assert_right(pool.run(train_all, 8, more), 5)


@pytest.mark.slow
def test_dtensors_that_are_sharded(pool: Pool) -> None:
    more = cases(("ZBV",), DP_EP, steps=5, shard="optimizer", dtensors=True)
    assert_right(pool.run(train_all, 8, more), 5)


def test_shards_where_each_process_has_its_own_experts(pool: Pool) -> None:
    assert_right(
        pool.run(train_all, 4, cases(("ZBV",), EP, steps=5, shard="optimizer")), 5
    )


@pytest.mark.slow
@pytest.mark.parametrize("broken", BREAKS)
def test_a_sum_that_is_left_out_or_done_twice_is_noticed(
    broken: str, pool: Pool
) -> None:
    """The controls of this file: each must fail."""
    sizes, n = (CP, 4) if "cp" in broken else (DP_EP, 8)
    runs = pool.run(train_all, n, cases(("ZBH1",), sizes, steps=5, broken=broken))
    with pytest.raises(AssertionError):
        assert_right(runs, 5)
