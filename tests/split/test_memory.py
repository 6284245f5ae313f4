"""What B leaves for W, and that W leaves nothing; how often a forward runs."""

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from split_runs import check_operands
from torch import Tensor, nn
from zoo import Checkpointed, mlp

from zbpp.runtime import SplitGraph, WeightQueue, split_forward


def test_b_keeps_only_the_operands_of_w() -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))
    x = torch.randn(4, 6)
    activations: list[weakref.ref[Tensor]] = []
    module[0].register_forward_hook(lambda m, x, y: activations.append(weakref.ref(y)))
    graph = split_forward(module, x)
    assert graph.stored_bytes() == 0 and activations[0]() is not None
    graph.backward_input(torch.randn(4, 5))
    inputs_and_gradients = 4 * (6 + 8) + 4 * (8 + 5)
    assert graph.stored_bytes() == 4 * inputs_and_gradients
    assert activations[0]() is None, "no product needs it"
    graph.backward_weight()
    assert graph.stored_bytes() == 0


def test_operands_stay_until_w_and_may_not_change() -> None:
    check_operands(lambda layer: layer)


def test_memory_is_freed_without_garbage_collection() -> None:
    module = mlp()
    recomputed = Checkpointed(module[:3])
    tensors: list[weakref.ref[Tensor]] = []

    def forward(x: Tensor) -> Tensor:
        hidden, other = recomputed(x), module[0](x)
        tensors.extend(map(weakref.ref, (x, hidden, other)))
        return module[3](hidden) + other[:, :6].sin()

    gc.disable()
    try:
        graph = split_forward(forward, torch.randn(4, 6, requires_grad=True))
        assert tensors[1]() is not None
        graph.backward_input(torch.ones(4, 6))
        graph.backward_weight()
        assert all(tensor() is None for tensor in tensors)
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_is_recomputed_once(reentrant: bool) -> None:
    calls = Counter[str]()
    module = Checkpointed(mlp(), reentrant=reentrant)
    module.inner.register_forward_pre_hook(lambda *_: calls.update(["forward"]))
    graph = split_forward(module, torch.randn(2, 6, requires_grad=True))
    graph.backward_input(torch.randn(2, 6))
    assert calls["forward"] == 2  # F, and one recomputation in B
    graph.backward_weight()
    assert calls["forward"] == 2


def test_callers_may_pass_a_weight_queue() -> None:
    layer, queue = nn.Linear(2, 3), WeightQueue()
    y = layer(torch.ones(4, 2))
    graph = SplitGraph([y], queue=queue)
    graph.backward_input(torch.ones(4, 3))
    assert graph.stored_bytes() > 0
    queue.run()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((3, 2), 4.0))


def test_an_input_that_is_not_a_leaf_is_refused() -> None:
    hidden: Any = nn.Linear(4, 4)(torch.ones(2, 4))
    with pytest.raises(ValueError, match="an input of B is no leaf"):
        SplitGraph([nn.Linear(4, 4)(hidden)], [hidden])
