"""Trainings on 2 stages x 2 replicas equal a plain loop, and one another to the bit."""

from typing import Any

import pytest
import torch
from mesh_runs import Found, train_all, train_plainly
from pool import Pool

pytestmark = pytest.mark.dist

HOWS = ("bare", "replicate")


def assert_right(runs: list[list[Found]], *, large: bool = False) -> None:
    """Within 1e-5 of the plain loop; the same bits on all replicas and in all runs."""
    results, plain, validation = train_plainly(large=large)
    for at_rank in zip(*runs, strict=True):
        for found in at_rank:
            for name, value in found.parameters.items():
                torch.testing.assert_close(value, plain[name], rtol=1e-5, atol=1e-6)
            for (loss, norm), own in zip(results, found.results, strict=True):
                assert own == pytest.approx((loss, norm), rel=1e-5)
            assert found.validation == pytest.approx(validation, rel=1e-5)
        together = {n: p for found in at_rank for n, p in found.parameters.items()}
        assert together.keys() == plain.keys()
        for found in at_rank:
            for name, value in found.parameters.items():
                assert torch.equal(value, together[name]), f"{name}: replicas differ"
    first, *others = [
        {n: p for found in at_rank for n, p in found.parameters.items()}
        for at_rank in zip(*runs, strict=True)
    ]
    for one in others:
        for name, value in one.items():
            assert torch.equal(value, first[name]), f"{name}: modes differ"


def test_bare_and_sharded_layers_train_alike(pool: Pool) -> None:
    cases = [("ZBV", how, {}) for how in HOWS] + [("1F1B", "kept", {})]
    cases += [("ZBH1", "bare", {"switches_at": 2})]
    runs = pool.run(train_all, 4, cases)
    assert_right(runs)
    assert [found.rollbacks for found in runs[0]] == [4, 4, 0, 4]


@pytest.mark.slow
def test_other_modes(pool: Pool) -> None:
    again = {"checkpointed": True}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("VPP", "bare", again),
        ("ZBH2", "kept", {}),
        ("VHalf", "resharded", again),
    ]
    runs = pool.run(train_all, 4, cases)
    assert_right(runs)
    assert [found.rollbacks for found in runs[0]] == [0, 4, 4]


@pytest.mark.slow
def test_parameters_that_are_stepped_in_pieces(pool: Pool) -> None:
    """More than 4 MiB: the buckets of a rollback cut them."""
    cases = [("1F1B", "bare", {"large": True}), ("ZBV", "kept", {"large": True})]
    runs = pool.run(train_all, 4, cases)
    assert_right(runs, large=True)
    assert runs[0][1].rollbacks == 2


@pytest.mark.slow
def test_sums_after_every_weight_pass_have_the_same_bits_in_all_modes(
    pool: Pool,
) -> None:
    cases = [("1F1B", "gradients", {}), ("VPP", "parameters", {})]
    assert_right(pool.run(train_all, 4, [*cases, ("ZBV", "gradients", {})]))
