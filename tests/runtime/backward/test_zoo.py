"""Every module of the zoo: B then W is the full backward, to the bit, in any order."""

import copy

import pytest
import torch
from zoo import Case, Square
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

from zbpp.runtime.backward.split import SplitGraph


def dtypes(case: Case) -> list[torch.dtype]:
    return [torch.float32] if case.autocast else [torch.float64, torch.float32]


@pytest.mark.parametrize("name", CASES)
def test_a_split_backward_is_the_full_one_to_the_bit(name: str) -> None:
    case = CASES[name]
    for dtype in dtypes(case):
        module = case.build().to(dtype)
        for order in ORDERS.values():
            first, second = copy.deepcopy(module), copy.deepcopy(module)
            expected = plainly(case, first, order.count("F"), dtype)
            found = split(case, second, order, dtype)
            assert not differences(found, expected), (dtype, order)


@pytest.mark.parametrize("name", CASES)
def test_without_exact_sums_they_agree_nearly(name: str) -> None:
    case, order = CASES[name], ORDERS["interleaved"]
    dtype = dtypes(case)[0]
    module = case.build().to(dtype)
    expected = plainly(case, copy.deepcopy(module), order.count("F"), dtype)
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
    split(case, case.build(), ORDERS["alone"], torch.float32)
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
