"""Stock torch's zero-bubble schedule runs with our split backward."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matmuls import CountMatmuls
from pool import Pool
from torch import Tensor, nn

from zbpp.runtime.backward.torch_stage import SplitModule

N_STAGES, N_MICROBATCHES, DIM = 2, 4, 6


def chunk_layers(chunk: int) -> nn.Module:
    torch.manual_seed(chunk)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(99)
    inputs, targets = torch.randn((2, 3 * N_MICROBATCHES, DIM), generator=generator)
    return inputs, targets


def run_zbv() -> dict[str, Any]:
    """One step of one rank; return its gradients."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

    rank = dist.get_rank()
    n_chunks = 2 * N_STAGES
    held = {c: chunk_layers(c) for c in (rank, n_chunks - 1 - rank)}
    stages = []
    for chunk, module in held.items():
        split = SplitModule(module)
        stages.append(
            PipelineStage(
                split, chunk, n_chunks, torch.device("cpu"), dw_builder=split.dw_builder
            )
        )
    schedule = ScheduleZBVZeroBubble(
        stages, N_MICROBATCHES, nn.functional.mse_loss, scale_grads=True
    )
    inputs, targets = batch()
    args = (inputs,) if rank == 0 else ()
    more = {"target": targets} if rank == 0 else {}  # rank 0 holds the last chunk too
    schedule.step(*args, **more)
    return {
        f"{chunk}.{name}": p.grad
        for chunk, module in held.items()
        for name, p in module.named_parameters()
    }


@pytest.mark.dist
def test_torch_runs_its_zbv_with_our_split(pool: Pool) -> None:
    found: dict[str, Tensor] = {}
    for gradients in pool.run(run_zbv, N_STAGES):
        found |= gradients
    chunks = [chunk_layers(chunk) for chunk in range(2 * N_STAGES)]
    for x, target in zip(*(t.chunk(N_MICROBATCHES) for t in batch()), strict=True):
        loss = nn.functional.mse_loss(nn.Sequential(*chunks)(x), target)
        loss.backward()
    for p in nn.Sequential(*chunks).parameters():
        p.grad.div_(N_MICROBATCHES)  # torch's pipelines scale at the end
    assert len(found) == 4 * 2 * N_STAGES
    for chunk, module in enumerate(chunks):
        for name, p in module.named_parameters():
            assert torch.equal(found[f"{chunk}.{name}"], p.grad), name


@pytest.mark.parametrize("is_first", [True, False])
def test_a_split_module_leaves_w_to_the_builder(is_first: bool) -> None:
    plain, split = chunk_layers(0), SplitModule(chunk_layers(0))
    x = torch.randn(4, DIM, requires_grad=not is_first)
    y = split(x)
    assert torch.equal(y, plain(x))
    with CountMatmuls() as b:
        y.backward(torch.ones_like(y))
    gradient = x.grad
    with CountMatmuls() as w:
        split.dw_builder()()
    x.grad = None
    plain(x).backward(torch.ones_like(y))
    assert (b.count, w.count) == (1 if is_first else 2, 2)
    assert is_first or torch.equal(gradient, x.grad)
    for p, q in zip(split.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    with torch.no_grad():
        assert not split(x).requires_grad


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
