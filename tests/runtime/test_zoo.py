"""Every module of the zoo: B then W is the full backward, to the bit, in any order."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from zoo import Case, Square
from zoo_cases import CASES

from zbpp.runtime.split_backward import SplitGraph
from zbpp.runtime.stage import Chunk, Stage
from zbpp.runtime.weight_queue import WeightQueue

ORDERS = {
    "alone": "F0 B0 W0",
    "one by one": "F0 B0 W0 F1 B1 W1 F2 B2 W2",
    "interleaved": "F0 F1 B0 F2 B1 W0 F3 B2 B3 W1 W2 W3",
    "W out of order": "F0 F1 F2 B0 B1 B2 W2 W0 W1",
    "B out of order": "F0 F1 F2 B2 B0 W2 B1 W1 W0",
}
Gradients = dict[str, list[Tensor]]


def inputs_of(case: Case, i: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    def prepare(x: Tensor) -> Tensor:
        return x.to(dtype).requires_grad_() if x.is_floating_point() else x

    return tuple(prepare(x.clone()) for x in case.inputs(i))


def gradient_of(y: Tensor, i: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + i)
    return torch.randn(y.shape, generator=generator).to(y.dtype)


def call(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    result = module(inputs[0] if len(inputs) == 1 else inputs)
    return result if isinstance(result, tuple) else (result,)


def plainly(case: Case, module: nn.Module, n: int, dtype: torch.dtype) -> Gradients:
    """One ``backward()`` for each micro-batch, in order."""
    found = {}
    for i in range(n):
        torch.manual_seed(i)
        inputs = inputs_of(case, i, dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            outputs = [y for y in call(module, inputs) if y.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [gradient_of(y, i) for y in outputs])
        found[f"inputs {i}"] = [
            torch.zeros_like(x) if x.grad is None else x.grad
            for x in inputs
            if x.requires_grad
        ]
    return found | gradients_of(module)


def gradients_of(module: nn.Module) -> Gradients:
    return {
        name: [] if p.grad is None else [p.grad]
        for name, p in module.named_parameters()
    }


def split(
    case: Case,
    module: nn.Module,
    order: str,
    dtype: torch.dtype,
    *,
    exact_sums: bool = True,
) -> Gradients:
    """The same by a stage that holds the middle chunk of three."""
    stage = Stage(
        [Chunk(1, 1, (module,))], n_chunks=3, loss_fn=lambda *_: torch.zeros(()),
        device=torch.device("cpu"), autocast=torch.bfloat16 if case.autocast else None,
        exact_sums=exact_sums,
    )  # fmt: skip
    passes = [(text[0], int(text[1:])) for text in order.split()]
    outputs: dict[int, Sequence[Tensor]] = {}
    found = {}
    for kind, i in passes:
        if kind == "F":
            torch.manual_seed(i)
            outputs[i] = stage.forward(1, i, inputs_of(case, i, dtype))
        elif kind == "B":
            dy = tuple(gradient_of(y, i) for y in outputs.pop(i) if y.requires_grad)
            found[f"inputs {i}"] = list(stage.backward_input(1, i, dy))
        else:
            stage.backward_weight(1, i)
    stage.assert_empty()
    return found | gradients_of(module)


def differences(left: Gradients, right: Gradients) -> list[str]:
    assert left.keys() == right.keys()
    return [
        name
        for name in left
        if len(left[name]) != len(right[name])
        or not all(map(torch.equal, left[name], right[name]))
    ]


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
    case = CASES[name]
    dtype = dtypes(case)[0]
    module = case.build().to(dtype)
    for order in ORDERS.values():
        first, second = copy.deepcopy(module), copy.deepcopy(module)
        expected = plainly(case, first, order.count("F"), dtype)
        found = split(case, second, order, dtype, exact_sums=False)
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


@pytest.mark.parametrize("wrong", ["forgotten", "doubled"])
def test_wrong_weight_work_would_be_noticed(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WeightQueue.run

    def forget(queue: WeightQueue) -> None:
        queue._work.clear()

    def double(queue: WeightQueue) -> None:
        queue._work *= 2
        run(queue)

    monkeypatch.setattr(WeightQueue, "run", forget if wrong == "forgotten" else double)
    noticed = []
    for name in ("linear", "einsum", "conv2d", "checkpoint", "autocast", "lora"):
        case = CASES[name]
        module = case.build()
        expected = plainly(case, copy.deepcopy(module), 1, torch.float32)
        try:
            found = split(case, module, ORDERS["alone"], torch.float32)
        except RuntimeError as error:  # a cast or view is freed after its first use
            assert "second time" in str(error)
            noticed.append(name)
        else:
            noticed += [name] if differences(found, expected) else []
    assert len(noticed) == 6


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
