"""The split backward alone: what B and W compute, keep and free, on a small MLP."""

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from matmuls import CountMatmuls
from torch import Tensor, nn
from zoo import Checkpointed, Fn, block, conv, mlp, offloaded

from zbpp.runtime import SplitGraph, split_forward
from zbpp.runtime.backward import graph as graph_module
from zbpp.runtime.backward.plan_cache import SplitPlanCache


def counts(module: nn.Module, x: Tensor) -> tuple[int, int, int]:
    """Matrix products in B, in W, and in a full backward."""
    plain = copy.deepcopy(module)
    graph = split_forward(module, x)
    dy = torch.ones_like(graph.outputs)
    with CountMatmuls() as b:
        graph.backward_input(dy)
    with CountMatmuls() as w:
        graph.backward_weight()
    y = plain(x)
    with CountMatmuls() as full:
        y.backward(dy)
    return b.count, w.count, full.count


def test_b_runs_no_weight_matmul_and_w_runs_no_other() -> None:
    x = torch.randn(3, 4, 6, requires_grad=True)
    assert counts(mlp(), x) == (2, 2, 4)
    b, w, full = counts(block(), x)
    assert (b + w, w) == (full, 2)
    b, w, full = counts(Checkpointed(block()), x)  # B recomputes, W does not
    assert (b + w, w) == (full, 2)


def test_the_first_stage_splits_too() -> None:
    module = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    assert counts(module, torch.randn(5, 6)) == (1, 2, 3)
    assert counts(nn.Linear(6, 6, bias=False), torch.randn(5, 6)) == (0, 1, 1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_is_recomputed_once(reentrant: bool) -> None:
    calls = Counter[str]()
    module = Checkpointed(mlp(), reentrant=reentrant)
    module.inner.register_forward_pre_hook(lambda *_: calls.update(["forward"]))
    graph = split_forward(module, torch.randn(2, 6, requires_grad=True))
    graph.backward_input(torch.randn(2, 6))
    assert calls["forward"] == 2  # F, and one recompute in B
    graph.backward_weight()
    assert calls["forward"] == 2


def test_inputs_and_outputs_may_be_nested_and_named() -> None:
    def function(x: Tensor, pair: Any, *, scale: float, more: Any) -> Any:
        y = layer(x + pair[1]) * scale
        return {"y": y, "rest": [more["z"] * 2, "text", None], "n": len(pair)}

    layer = nn.Linear(4, 4)
    x, p, z = (torch.randn(2, 4, requires_grad=True) for _ in range(3))
    fixed = torch.randn(2, 4)
    graph = split_forward(function, x, (fixed, p), scale=0.5, more={"z": z, "m": 3})
    outputs = graph.outputs
    assert outputs["n"] == 2 and outputs["rest"][1:] == ["text", None]
    assert outputs["y"].requires_grad and outputs["y"].is_leaf
    dy = torch.randn(2, 4)
    dx, dp, dz = graph.backward_input([dy, dy])
    assert torch.equal(dz, dy * 2) and torch.equal(dx, dp)
    assert x.grad is None and layer.weight.grad is None
    graph.backward_weight()
    (expected,) = torch.autograd.grad(layer(x + p) * 0.5, layer.weight, dy)
    assert torch.equal(layer.weight.grad, expected)


def test_a_scalar_needs_no_gradient() -> None:
    layer = nn.Linear(4, 1)
    graph = split_forward(lambda: layer(torch.ones(4)).sum())
    assert graph.backward_input() == ()
    graph.backward_weight()
    assert torch.equal(layer.weight.grad, torch.ones(1, 4))


def test_leaves_that_get_one_gradient_have_sums_of_their_own() -> None:
    """Autograd returns one tensor for both, which is what the script has handed in."""
    layer, dy, plans = nn.Linear(4, 4), torch.ones(2, 4), SplitPlanCache()
    both = [nn.Parameter(torch.zeros(2, 4)) for _ in range(2)]
    for n in (1, 1, 2):  # the second graph has the plan of the first
        if n == 1:
            both[0].grad = both[1].grad = None
        y = layer(torch.ones(2, 4)) + both[0] + both[1]
        graph = SplitGraph([y], plans=plans)
        graph.backward_input(dy)
        graph.backward_weight()
        assert all(torch.equal(p.grad, n * torch.ones(2, 4)) for p in both)
    assert torch.equal(dy, torch.ones(2, 4))


def test_the_report_gives_reasons() -> None:
    class Sub(nn.Parameter):
        pass

    tied = nn.Linear(6, 6)
    odd = nn.Linear(6, 6)
    odd.weight = Sub(odd.weight.detach())
    module = nn.Sequential(tied, nn.LayerNorm(6), tied, odd, nn.Linear(6, 2))
    graph = SplitGraph([module(torch.randn(2, 6))])
    where = {name: graph.report()[p] for name, p in module.named_parameters()}
    assert where == {
        "0.weight": "B: used 2 times",
        "0.bias": "B: no product's weight",
        "1.weight": "B: no product's weight",
        "1.bias": "B: no product's weight",
        "3.weight": "B: a Sub",
        "3.bias": "B: no product's weight",
        "4.weight": "W",
        "4.bias": "B: no product's weight",
    }
    for module, reason in (
        (Checkpointed(mlp(), reentrant=True), "B: reentrant checkpoint"),
        (Fn(offloaded, inner=mlp()), "B: packed by saved-tensor hooks"),
    ):
        graph = SplitGraph([module(torch.randn(2, 6, requires_grad=True))])
        assert reason in graph.report().values()


def test_passes_in_a_wrong_order_are_refused() -> None:
    graph = split_forward(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="W runs after B"):
        graph.backward_weight()
    graph.backward_input(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="B runs once"):
        graph.backward_input(torch.ones(1, 2))


def test_a_tensor_that_was_changed_before_w_is_refused() -> None:
    state = torch.ones(3, 6)
    graph = split_forward(lambda: nn.Linear(6, 2)(state).sum())
    graph.backward_input()
    state.add_(1)
    with pytest.raises(RuntimeError, match="changed in place after B"):
        graph.backward_weight()


@pytest.mark.parametrize("build", [mlp, conv, lambda: Checkpointed(mlp())])
def test_every_hook_fires_once_a_micro_batch(build: Callable[[], nn.Module]) -> None:
    module = build()
    fired = Counter[str]()
    for name, p in module.named_parameters():
        p.register_hook(lambda _, n=name: fired.update([f"tensor {n}"]))
        p.register_post_accumulate_grad_hook(
            lambda p, n=name: fired.update([f"accumulated {n}"])
        )
    for _ in range(3):
        x = torch.randn(2, 4, 6, 6, requires_grad=True)
        graph = split_forward(module, x)
        graph.backward_input(torch.ones_like(graph.outputs))
        graph.backward_weight()
    names = [name for name, _ in module.named_parameters()]
    assert fired == {f"{k} {n}": 3 for k in ("tensor", "accumulated") for n in names}


def test_w_frees_what_it_used_and_nothing_leaks() -> None:
    module = mlp()
    kept: list[weakref.ref[Tensor]] = []

    def forward(x: Tensor) -> Tensor:
        hidden = module[:3](x)
        inner = module[0](x)
        kept.extend([weakref.ref(hidden), weakref.ref(inner)])
        return module[3](hidden) + inner[:, :6].sin()

    gc.disable()  # no cycles: all is freed at once
    try:
        graph = split_forward(forward, torch.randn(4, 6, requires_grad=True))
        assert kept[0]() is not None
        graph.backward_input(torch.ones(4, 6))
        graph.backward_weight()
        assert kept[0]() is None and kept[1]() is None
    finally:
        gc.enable()


def test_nothing_is_left_after_many_steps() -> None:
    module = nn.Sequential(Checkpointed(mlp()), mlp())

    def n_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    def step() -> None:
        graph = split_forward(module, torch.randn(4, 6, requires_grad=True))
        graph.backward_input(torch.ones(4, 6))
        graph.backward_weight()

    step()
    before = n_tensors()
    for _ in range(20):
        step()
    assert n_tensors() <= before


@pytest.mark.parametrize("name", ["has_saved", "can_read_saved"])
def test_a_torch_that_hides_its_values_runs_all_in_b(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Conv1d(4, 4, 3, padding=1))
    x = torch.randn(4, 6)
    module(x).sum().backward()
    plain = [p.grad for p in module.parameters()]
    module.zero_grad()
    monkeypatch.setattr(graph_module, name, lambda *_: False)
    graph = SplitGraph([module(x)])
    assert all(text.startswith("B: ") for text in graph.report().values())
    graph.backward_input(torch.ones(4, 6))
    split = [p.grad for p in module.parameters()]
    graph.backward_weight()
    assert [p.grad for p in module.parameters()] == split
    for got, want in zip(split, plain, strict=True):
        assert got is not None and want is not None and torch.equal(got, want)


def test_b_leaves_the_operands_of_w_and_no_more() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    graph = split_forward(module, torch.randn(4, 6))
    assert graph.held_bytes() == 0
    graph.backward_input(torch.randn(4, 5))
    inputs_and_gradients = 4 * (6 + 8) + 4 * (8 + 5)
    assert graph.held_bytes() == 4 * inputs_and_gradients
    graph.backward_weight()
    assert graph.held_bytes() == 0
