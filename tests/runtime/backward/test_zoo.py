"""Every module of the zoo: B then W is the full backward, to the bit, in any order."""

import copy

import pytest
import torch
from zoo import Square
from zoo_cases import CASES
from zoo_runs import (
    ORDERS,
    call,
    differences,
    gradient_of,
    inputs_of,
    plainly,
    split,
)

from zbpp.runtime import SplitGraph


@pytest.mark.parametrize("name", CASES)
def test_a_split_backward_is_the_full_one_to_the_bit(name: str) -> None:
    case, module, expected = CASES[name], CASES[name].build(), {}
    for order in ORDERS.values():
        if (n := order.count("F")) not in expected:
            expected[n] = plainly(case, copy.deepcopy(module), n, torch.float32)
        found = split(case, copy.deepcopy(module), order, torch.float32)
        assert not differences(found, expected[n]), order


@pytest.mark.parametrize("name", CASES)
def test_other_sums_and_other_dtypes(name: str) -> None:
    """Without exact sums they agree nearly."""
    case, order = CASES[name], ORDERS["interleaved"]
    dtype = torch.float32 if case.autocast else torch.float64
    module = case.build().to(dtype)
    expected = plainly(case, copy.deepcopy(module), order.count("F"), dtype)
    found = split(case, copy.deepcopy(module), order, dtype)
    assert not differences(found, expected)
    found = split(case, copy.deepcopy(module), order, dtype, exact_sums=False)
    for key, tensors in expected.items():
        torch.testing.assert_close(found[key], tensors)


@pytest.mark.parametrize("name", CASES)
def test_the_weights_of_products_wait_for_w(name: str) -> None:
    case = CASES[name]
    module = case.build()
    inputs = inputs_of(case, 1, torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        outputs = call(module, inputs)
    where = SplitGraph(outputs, inputs).report()
    waits = {n for n, p in module.named_parameters() if where.get(p) == "W"}
    assert waits == set(case.waits.split())
    rest = [text for text in where.values() if text != "W"]
    assert all(text.startswith("B: ") for text in rest)


def test_a_custom_backward_runs_once() -> None:
    case = CASES["custom function"]
    before = Square.calls
    split(case, case.build(), "F0 B0 W0", torch.float32)
    assert Square.calls == before + 1


def test_another_order_of_sums_would_be_noticed() -> None:
    case = CASES["mlp"]
    module = case.build()
    forwards = plainly(case, copy.deepcopy(module), 3, torch.float32)
    total = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for i in (2, 1, 0):
        alone = copy.deepcopy(module)
        (x,) = inputs_of(case, i, torch.float32)
        y = alone(x)
        y.backward(gradient_of(y, i))
        for name, p in alone.named_parameters():
            assert p.grad is not None
            total[name] += p.grad
    assert any(not torch.equal(total[name], forwards[name][0]) for name in total)
