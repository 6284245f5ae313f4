"""Every module of the zoo: B then W is the full backward, to the bit, in any order."""

import pytest
import torch
from split_runs import (
    IN_ORDER,
    OUT_OF_ORDER,
    Numbered,
    by_pipeline,
    check,
    differences,
    plainly,
)
from zoo import CASES

pytestmark = pytest.mark.filterwarnings("ignore:.* gains little here")


@pytest.mark.parametrize("name", CASES)
def test_a_split_backward_is_autograds(name: str) -> None:
    check(CASES[name])


ADDED_BY_PRODUCTS = (
    "linear, no bias", "mlp", "matmul", "matmul from the left", "bmm", "addmm",
    "conv net", "tied weights", "lora", "experts selected", "hooks of parameters",
    "checkpointed attention", "embedding, sparse, tied to its head", "autocast",
)  # fmt: skip


@pytest.mark.parametrize("name", ADDED_BY_PRODUCTS)
def test_gradients_added_within_products_agree_nearly(name: str) -> None:
    """Hooks see as many gradients."""
    case = CASES[name]
    wanted = plainly(Numbered(case), 4, scale=0.25)
    found = by_pipeline(Numbered(case), IN_ORDER, exact_sums=False)
    assert len(found.pop("seen")) == len(wanted["seen"])
    for parameter, gradient in found.items():
        torch.testing.assert_close(
            gradient, wanted[parameter], rtol=1e-4, atol=1e-5, check_layout=False
        )


def test_a_sum_in_another_order_has_other_bits() -> None:
    """The control: these numbers are such that the order shows."""
    case = CASES["mlp"]
    module = Numbered(case)
    for i in (2, 0, 3, 1):
        loss = module(torch.tensor(i))
        loss.backward(torch.full_like(loss, 0.25))
    wanted = plainly(Numbered(case), 4, scale=0.25)
    assert "inner.0.weight" in differences(module.found(), wanted)
    assert not differences(by_pipeline(Numbered(case), OUT_OF_ORDER), wanted)
