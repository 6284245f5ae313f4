"""Stock torch's zero-bubble schedule runs with our split backward."""

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
