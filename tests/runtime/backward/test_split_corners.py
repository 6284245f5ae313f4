"""Corners of the split backward: each as autograd does it, or refused in words."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.runtime import SplitGraph, WeightQueue, split_forward
from zbpp.runtime.backward.accumulate import GradientOrder
from zbpp.runtime.backward.queue import current_queue


def both(graph: SplitGraph, dy: Tensor) -> None:
    graph.backward_input(dy)
    graph.backward_weight()


# the factor of a product


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("name", ["addmm", "baddbmm"])
def test_a_complex_factor_is_conjugated(name: str, is_exact: bool) -> None:
    batch = () if name == "addmm" else (2,)
    b, x, w = (
        torch.randn(*batch, *shape, dtype=torch.complex128)
        for shape in ((3, 5), (3, 4), (4, 5))
    )
    w.requires_grad_()
    product = getattr(torch, name)
    for _ in range(2):
        y = product(b, x, w, beta=0.5 + 1j, alpha=0.3 - 0.7j)
        (want,) = torch.autograd.grad(y, w, torch.ones_like(y))
        before = 0 if w.grad is None else w.grad.clone()
        y = product(b, x, w, beta=0.5 + 1j, alpha=0.3 - 0.7j)
        graph = SplitGraph([y], is_exact=is_exact)
        assert graph.report()[w] == "W"
        both(graph, torch.ones_like(y))
        torch.testing.assert_close(w.grad, before + want)


def test_an_input_that_is_no_leaf_is_refused() -> None:
    hidden = nn.Linear(4, 4)(torch.ones(2, 4))
    with pytest.raises(RequestError, match="an input of B is no leaf"):
        SplitGraph([nn.Linear(4, 4)(hidden)], [hidden])


# failures


def test_w_after_a_failed_w_is_refused() -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("mine")

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    handle = module[0].weight.register_hook(fail)
    graph = split_forward(module, torch.ones(2, 4))
    graph.backward_input(torch.ones(2, 4))
    with pytest.raises(ValueError, match="mine"):
        graph.backward_weight()
    handle.remove()
    with pytest.raises(RuntimeError, match="W has failed before"):
        graph.backward_weight()


@pytest.mark.parametrize("wrong", [[], [None], [torch.ones(2, 4)] * 3, None])
def test_a_wrong_number_of_gradients_does_not_spend_the_graph(wrong: Any) -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    order = GradientOrder(layer.parameters())
    layer.bias.grad = torch.ones(4)
    for run in ("graph", "order"):
        y = layer(x)
        graph = SplitGraph([y, y * 2], [x])
        why = "B needs gradients" if wrong is None else f"{len(wrong)} gradients, and 2"
        with pytest.raises(RequestError, match=why):
            if run == "graph":
                graph.backward_input(wrong)
            else:
                order.run_b(0, graph, wrong)
        assert torch.equal(layer.bias.grad, torch.ones(4))
        (dx,) = graph.backward_input([torch.ones(2, 4), None])
        assert dx is not None and torch.equal(dx, torch.ones(2, 4) @ layer.weight)
        layer.bias.grad = torch.ones(4)


def test_a_gradient_of_a_wrong_shape_does_not_spend_the_graph() -> None:
    graph = split_forward(nn.Linear(4, 4), torch.ones(2, 4))
    with pytest.raises(RequestError, match=r"gradient 0 has the shape \[4, 2\]"):
        graph.backward_input(torch.ones(4, 2))
    both(graph, torch.ones(2, 4))


# what changes between the passes


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("build", [lambda: nn.Linear(4, 4), lambda: nn.Conv1d(4, 4, 1)])
@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("is_planned", [True, False])
def test_a_parameter_frozen_between_f_and_b(
    build: Callable[[], nn.Module], name: str, is_planned: bool, is_exact: bool
) -> None:
    module = build()
    plain = copy.deepcopy(module)
    x = torch.randn(2, 4, 4)
    for _ in range(2):
        y, z = plain(x), module(x)
        graph = SplitGraph([z], is_exact=is_exact)
        if is_planned:
            graph.report()
        for part in (plain, module):
            getattr(part, name).requires_grad_(False)
        y.backward(torch.ones_like(y))
        both(graph, torch.ones_like(y))
        for part in (plain, module):
            part.requires_grad_(True)
    assert getattr(module, name).grad is None
    for p, q in zip(module.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.allclose(p.grad, q.grad)


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_weight_frozen_between_b_and_w_gets_nothing(is_exact: bool) -> None:
    layer = nn.Linear(4, 4)
    both(SplitGraph([layer(torch.ones(2, 4))]), torch.ones(2, 4))
    before = layer.weight.grad.clone()
    graph = SplitGraph([layer(torch.ones(2, 4))], is_exact=is_exact)
    graph.backward_input(torch.ones(2, 4))
    layer.weight.requires_grad_(False)
    graph.backward_weight()
    assert torch.equal(layer.weight.grad, before)


# unusual tensors


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_gradient_made_in_inference_mode(is_exact: bool) -> None:
    layer = nn.Linear(4, 4)
    for _ in range(2):
        with torch.inference_mode():
            dy = torch.ones(2, 4)
        both(SplitGraph([layer(torch.ones(2, 4))], is_exact=is_exact), dy)
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 4.0))


def sparse_parameter() -> nn.Parameter:
    return nn.Parameter(torch.eye(4).to_sparse())


def test_a_sparse_parameter_stays_in_b() -> None:
    weight, x = sparse_parameter(), torch.randn(4, 3, requires_grad=True)
    torch.mm(weight, x).sum().backward()
    want, weight.grad = weight.grad, None
    graph = SplitGraph([torch.mm(weight, x)], [x])
    assert graph.report()[weight] == "B: its layout is torch.sparse_coo"
    (dx,) = graph.backward_input(torch.ones(4, 3))
    graph.backward_weight()
    assert torch.equal(weight.grad.to_dense(), want.to_dense())
    assert torch.equal(dx, x.grad)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("is_transposed", [True, False])
def test_a_sparse_operand(is_transposed: bool, is_exact: bool) -> None:
    x = torch.eye(4).to_sparse()
    weight = nn.Parameter(torch.randn(4, 4))

    def run() -> Tensor:
        return torch.mm(x, weight.t() if is_transposed else weight)

    for _ in range(2):
        (want,) = torch.autograd.grad(run(), weight, torch.ones(4, 4))
        before = 0 if weight.grad is None else weight.grad.clone()
        graph = SplitGraph([run()], is_exact=is_exact)
        graph.backward_input(torch.ones(4, 4))
        assert graph.held_bytes() > 0
        graph.backward_weight()
        torch.testing.assert_close(weight.grad, before + want)


def test_in_place_beside_a_sparse_gradient() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    rows = torch.tensor([0, 2])
    for run in ("plain", "split"):
        nn.functional.embedding(rows, weight, sparse=True).sum().backward()
        assert weight.grad is not None and weight.grad.is_sparse
        y = torch.ones(2, 4) @ weight
        if run == "plain":
            y.sum().backward()
            want, weight.grad = weight.grad, None
        else:
            both(SplitGraph([y], is_exact=False), torch.ones(2, 4))
    assert torch.equal(weight.grad.to_dense(), want.to_dense())


# memory


def test_a_split_forward_may_begin_in_place() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    graph = split_forward(nn.ReLU(inplace=True), x + 0)
    (dx,) = graph.backward_input(torch.ones(2, 4))
    assert torch.equal(dx, (x > 0).float())


def test_a_queue_that_failed_may_not_run() -> None:
    queue = WeightQueue()
    queue.defer((), lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        queue.run()
    with pytest.raises(RuntimeError, match="incomplete"):
        queue.run()


def test_a_pass_within_a_pass_has_a_queue_of_its_own() -> None:
    outer, inner = WeightQueue(), WeightQueue()
    with outer:
        with inner:
            assert current_queue() is inner
        assert current_queue() is outer
    assert current_queue() is None


def test_a_gradient_that_an_input_has_is_neither_changed_nor_added_to() -> None:
    layer = nn.Linear(2, 3)
    fresh, used = (torch.ones(4, 2, requires_grad=True) for _ in range(2))
    used.grad = before = torch.full((4, 2), 7.0)
    graph = SplitGraph([layer(fresh + used)], [fresh, used])
    results = graph.backward_input(torch.ones(4, 3))
    expected = torch.ones(4, 3) @ layer.weight
    assert all(torch.equal(result, expected) for result in results)
    assert fresh.grad is None
    assert used.grad is before and bool((before == 7.0).all())
