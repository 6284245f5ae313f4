"""Stock torch loads an exported schedule, runs it, and gets the serial gradients."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn

from zbpp.planning import plan
from zbpp.schedules import to_torch_csv

pytestmark = pytest.mark.dist

N_STAGES, N_MICROBATCHES, DIM = 2, 5, 6
Gradients = dict[str, list[float]]


def chunk_layers(chunk: int) -> nn.Module:
    torch.manual_seed(chunk)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(99)
    size = (2, 3 * N_MICROBATCHES, DIM)
    inputs, targets = torch.randn(size, generator=generator)
    return inputs, targets


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


def test_torch_refuses_our_letters_and_a_schedule_without_a_pass(pool: Pool) -> None:
    schedule = plan("ZBH1", n_stages=N_STAGES, n_microbatches=N_MICROBATCHES)
    csv, stage_of = to_torch_csv(schedule), schedule.placement.stage_of
    for wrong, reason in (
        (csv.replace("I", "B"), "without first running Backward Input"),
        (csv.replace("0W1,", ""), "I and W must have equal counts"),
    ):
        for message in pool.run(refusal_of_torch, N_STAGES, wrong, stage_of):
            assert reason in message
