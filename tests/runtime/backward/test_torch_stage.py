"""Stock torch runs its schedule with our split backward, and schedules of ours."""

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matmuls import CountMatmuls
from pool import Pool
from torch import Tensor, nn

from zbpp.planning import plan
from zbpp.runtime import SplitModule
from zbpp.schedules import to_torch_csv

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


# Torch's own backward, by our schedules.

Gradients = dict[str, list[float]]


def gradients(chunks: dict[int, nn.Module]) -> Gradients:
    return {
        f"{chunk}.{name}": parameter.grad.flatten().tolist()
        for chunk, module in chunks.items()
        for name, parameter in module.named_parameters()
    }


def run_in_torch(csv: str, stage_of: tuple[int, ...]) -> tuple[Gradients, list[float]]:
    """Run on one rank; return its gradients, and the losses if it holds the last."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    rank = dist.get_rank()
    chunks = {c: chunk_layers(c) for c, stage in enumerate(stage_of) if stage == rank}
    stages = [
        PipelineStage(module, chunk, len(stage_of), torch.device("cpu"))
        for chunk, module in chunks.items()
    ]
    runtime = _PipelineScheduleRuntime(
        stages, N_MICROBATCHES, loss_fn=nn.functional.mse_loss
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(csv)
        runtime._load_csv(str(path))
    inputs, targets = batch()
    losses: list[Tensor] = []
    has_last = len(stage_of) - 1 in chunks
    runtime.step(
        *([inputs] if 0 in chunks else []),
        target=targets if has_last else None,
        losses=losses if has_last else None,
        return_outputs=False,
    )
    return gradients(chunks), [loss.item() for loss in losses]


def run_serially(
    n_chunks: int, *, n_used: int = N_MICROBATCHES
) -> tuple[Gradients, list[float]]:
    chunks = {chunk: chunk_layers(chunk) for chunk in range(n_chunks)}
    model = nn.Sequential(*chunks.values())
    losses = []
    pairs = zip(*(half.chunk(N_MICROBATCHES) for half in batch()), strict=True)
    for inputs, targets in list(pairs)[:n_used]:
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        losses.append(loss.item())
    for parameter in model.parameters():
        parameter.grad.div_(N_MICROBATCHES)  # torch's pipelines scale at the end
    return gradients(chunks), losses


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["FThenB", "VPP", "ZBH1", "ZBV"])
def test_torch_runs_the_exported_schedule(pool: Pool, mode: str) -> None:
    schedule = plan(mode, n_stages=N_STAGES, n_microbatches=N_MICROBATCHES)
    stage_of = schedule.placement.stage_of
    parts = pool.run(run_in_torch, N_STAGES, to_torch_csv(schedule), stage_of)
    found = {name: grad for part, _ in parts for name, grad in part.items()}
    losses = [loss for _, part in parts for loss in part]
    assert (found, losses) == run_serially(len(stage_of))  # to the last bit
    fewer, _ = run_serially(len(stage_of), n_used=N_MICROBATCHES - 1)
    assert all(found[name] != fewer[name] for name in fewer)  # it can fail


def refusal_of_torch(csv: str, stage_of: tuple[int, ...]) -> str:
    try:
        run_in_torch(csv, stage_of)
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error)
    return "accepted"


@pytest.mark.dist
def test_torch_refuses_our_letters_and_a_schedule_without_a_pass(pool: Pool) -> None:
    schedule = plan("ZBH1", n_stages=N_STAGES, n_microbatches=N_MICROBATCHES)
    csv, stage_of = to_torch_csv(schedule), schedule.placement.stage_of
    for wrong, reason in (
        (csv.replace("I", "B"), "without first running Backward Input"),
        (csv.replace("0W1,", ""), "I and W must have equal counts"),
    ):
        for message in pool.run(refusal_of_torch, N_STAGES, wrong, stage_of):
            assert reason in message


# A split module alone.


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
