"""The module for torch's pipeline: no W is lost, and copies work."""

import copy
import pickle

import pytest
import torch
from torch import nn

from zbpp.runtime.backward.torch_stage import SplitModule


def pair() -> tuple[nn.Module, SplitModule]:
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    return copy.deepcopy(module), SplitModule(module)


def same_gradients(plain: nn.Module, split: SplitModule) -> bool:
    pairs = zip(plain.parameters(), split.module.parameters(), strict=True)
    return all(p.grad is not None and torch.equal(p.grad, q.grad) for p, q in pairs)


@pytest.mark.parametrize("is_together", [True, False])
def test_several_forwards_and_backwards_before_the_builder(is_together: bool) -> None:
    plain, split = pair()
    batches = [torch.randn(2, 4, dtype=torch.float64) for _ in range(3)]
    for module in (plain, split):
        losses = [module(x).square().sum() for x in batches]
        for loss in [torch.stack(losses).sum()] if is_together else losses:
            loss.backward()
    split.dw_builder()()
    for p, q in zip(plain.parameters(), split.module.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    assert is_together or same_gradients(plain, split)
    split.dw_builder()()  # nothing is left
    assert is_together or same_gradients(plain, split)


def test_each_w_belongs_to_its_backward() -> None:
    plain, split = pair()
    batches = [torch.randn(2, 4, dtype=torch.float64) for _ in range(3)]
    outputs = [split(x) for x in batches]
    works = []
    for y in outputs:
        y.sum().backward()
        works.append(split.dw_builder())
    weight = split.module[2].weight
    assert weight.grad is None
    for i in (1, 2, 0):
        weight.grad = None
        works[i]()
        (want,) = torch.autograd.grad(plain(batches[i]).sum(), plain[2].weight)
        assert torch.equal(weight.grad, want)


def test_a_split_module_is_copied_without_the_w_that_is_left() -> None:
    plain, split = pair()
    x = torch.ones(2, 4, dtype=torch.float64)
    plain(x).sum().backward()
    split(x).sum().backward()
    copies = [copy.deepcopy(split), pickle.loads(pickle.dumps(split))]
    for copied in copies:
        assert all(p.grad is None for p in copied.parameters())
        copied.dw_builder()()
        assert all(p.grad is None for p in copied.parameters())
        copied(x).sum().backward()
        copied.dw_builder()()
        assert same_gradients(plain, copied)
    split.dw_builder()()
    assert same_gradients(plain, split)


@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_split_module_may_begin_in_place(is_leaf: bool) -> None:
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    plain, split = copy.deepcopy(module), SplitModule(module)
    start = torch.randn(2, 4)
    starts = [start.clone().requires_grad_() for _ in range(2)]
    plain(starts[0] + 0).sum().backward()
    split(starts[1] if is_leaf else starts[1] + 0).sum().backward()
    split.dw_builder()()
    assert torch.equal(starts[0].grad, starts[1].grad)
    assert same_gradients(plain, split)
