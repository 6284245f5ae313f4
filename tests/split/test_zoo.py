"""Every module of the zoo: B then W is the full backward, to the bit, in any order."""

from collections.abc import Callable
from typing import Any

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
from torch import Tensor, nn
from torch.nn import functional as f
from torch.utils.checkpoint import checkpoint
from zoo import CASES, Case, Fn, features, lin, offloaded

pytestmark = pytest.mark.filterwarnings("ignore:.* gains little here")


@pytest.mark.parametrize("name", CASES)
def test_a_split_backward_equals_autograd(name: str) -> None:
    check(CASES[name])


# Micro-batches 2 and 3 of six take another way than those before and after them.


def three_uses(m: Any, x: Tensor, *order: int) -> Tensor:
    parts = x.sin(), x.cos(), x
    found = {i: parts[i] @ m.v for i in order}
    return found[0] + found[1] + found[2]


Way = Callable[[Any, Tensor], Tensor]
WAYS: dict[str, Way] = {
    "plain": lambda m, x: m.norm(m.b(m.a(x).tanh())) + three_uses(m, x, 0, 1, 2),
    "other turns": lambda m, x: m.norm(m.b(m.a(x).tanh())) + three_uses(m, x, 2, 0, 1),
    "swapped": lambda m, x: m.norm(m.a(m.b(x).tanh())),
    "another norm": lambda m, x: m.other(m.b(m.a(x).tanh())),
    "used twice": lambda m, x: m.norm(m.b(m.b(x).tanh())),
    "a copied weight": lambda m, x: m.norm(m.b(f.linear(x, m.a.weight + 0))),
    "other parts": lambda m, x: m.norm(x @ m.w[1]) + x @ m.w[2],
    "one part": lambda m, x: m.norm(x @ m.w[1]) + x @ m.w[1],
    "packed": lambda m, x: offloaded(m, x),
    "recomputed": lambda m, x: checkpoint(WAYS["plain"], m, x, use_reentrant=False),
}


def with_ways(way: str) -> Case:
    def call(m: Any, value: tuple[Tensor, Tensor]) -> Tensor:
        x, is_other = value
        return WAYS[way if is_other else "plain"](m, x) + x @ m.w[0] + x @ m.w[1]

    def build() -> nn.Module:
        module: Any = Fn(call, a=lin(), b=lin(), v=(6, 6), w=(3, 6, 6))
        module.norm, module.other = nn.LayerNorm(6), nn.LayerNorm(6)
        module.inner = nn.Sequential(module.a, nn.Tanh(), module.b, module.norm)
        return module  # type: ignore[no-any-return]

    def inputs(i: int) -> tuple[Tensor, ...]:
        return features(i)[0], torch.tensor(i in (2, 3))

    return Case(build, "", inputs)


@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_may_take_different_branches(way: str) -> None:
    in_turn = " ".join(f"F{i} B{i} W{i}" for i in range(6))
    check(with_ways(way), orders=(in_turn,))


ADDED_BY_PRODUCTS = (
    "linear, no bias", "mlp", "matmul", "matmul from the left", "bmm", "addmm",
    "conv net", "tied weights", "lora", "experts selected", "hooks of parameters",
    "checkpointed attention", "embedding, sparse, tied to its head", "autocast",
)  # fmt: skip


WHOLE_BACKWARDS = "F0 F1 BW0 F2 BW1 F3 BW2 BW3"


@pytest.mark.parametrize("order", [IN_ORDER, WHOLE_BACKWARDS])
@pytest.mark.parametrize("name", ADDED_BY_PRODUCTS)
def test_gradients_accumulated_in_the_product_agree_within_rounding(
    name: str, order: str
) -> None:
    """Hooks see as many gradients."""
    case = CASES[name]
    wanted = plainly(Numbered(case), 4, scale=0.25)
    found = by_pipeline(Numbered(case), order, exact_sums=False)
    assert len(found.pop("seen")) == len(wanted["seen"])
    for parameter, gradient in found.items():
        torch.testing.assert_close(
            gradient, wanted[parameter], rtol=1e-4, atol=1e-5, check_layout=False
        )


@pytest.mark.parametrize("order", [IN_ORDER, WHOLE_BACKWARDS])
@pytest.mark.parametrize("exact_sums", [True, False])
def test_the_kernel_of_a_product_adds_only_where_sums_need_not_be_exact(
    exact_sums: bool,
    order: str,
) -> None:
    module = Numbered(CASES["linear, no bias"])
    with torch.profiler.profile() as profile:
        by_pipeline(module, order, exact_sums=exact_sums)
    adds = [event for event in profile.events() if event.name == "aten::addmm_"]
    assert len(adds) == (0 if exact_sums else 2 * 3)


def test_sums_in_another_order_have_different_bits() -> None:
    """The control: these numbers are such that the order shows."""
    case = CASES["mlp"]
    module = Numbered(case)
    for i in (2, 0, 3, 1):
        loss = module(torch.tensor(i))
        loss.backward(torch.full_like(loss, 0.25))
    wanted = plainly(Numbered(case), 4, scale=0.25)
    assert "inner.0.weight" in differences(module.found(), wanted)
    assert not differences(by_pipeline(Numbered(case), OUT_OF_ORDER), wanted)
