"""torch's schedules run our split backward, and torch runs schedules of ours."""

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from matmuls import CountMatmuls
from pool import Pool
from torch import Tensor, nn
from zoo import normal

from zbpp.planning import plan
from zbpp.runtime import SplitModule
from zbpp.schedules import to_torch_csv

N_STAGES, N_MICROBATCHES, DIM = 2, 4, 6
EXACTLY = {"rtol": 0.0, "atol": 0.0}
Gradients = dict[str, Tensor]


def chunk_layers(chunk: int) -> nn.Module:
    torch.manual_seed(chunk)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))


def batch() -> tuple[Tensor, Tensor]:
    return normal(0, 3 * N_MICROBATCHES, DIM), normal(1, 3 * N_MICROBATCHES, DIM)


def torch_pipeline(chunks: nn.ModuleDict, *, csv: str, n_chunks: int) -> Any:
    """Torch's schedule of a rank's chunks, put together as torchtitan does it.

    Args:
        chunks: by number.
        csv: of a schedule; empty: that of torch for zero bubbles on a V.
        n_chunks: of all ranks.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import (
        ScheduleZBVZeroBubble,
        _PipelineScheduleRuntime,
    )

    cpu = torch.device("cpu")
    stages = [PipelineStage(x, int(c), n_chunks, cpu) for c, x in chunks.items()]
    kind = _PipelineScheduleRuntime if csv else ScheduleZBVZeroBubble
    runtime: Any = kind(stages, N_MICROBATCHES, loss_fn=nn.functional.mse_loss)
    if csv:
        runtime._load_csv(csv)
    return runtime, chunks


def run_in_torch(
    csv: str, stage_of: tuple[int, ...], is_split: bool
) -> tuple[Gradients, list[float], int]:
    """Of a rank: gradients, losses if it has the last chunk, products in its W's."""
    from torchtitan_zbpp import with_split_backward  # the example

    last, rank = len(stage_of) - 1, dist.get_rank()
    chunks = nn.ModuleDict(
        {str(c): chunk_layers(c) for c, stage in enumerate(stage_of) if stage == rank}
    )
    pipelining = with_split_backward(torch_pipeline) if is_split else torch_pipeline
    runtime, _ = pipelining(chunks, csv=csv, n_chunks=len(stage_of))
    products = CountMatmuls()

    def counted(run: Any) -> None:
        with products:
            run()

    for stage in runtime._stages if is_split else ():
        build = stage.dw_builder
        stage.dw_builder = lambda build=build: partial(counted, build())
    inputs, targets = batch()
    losses: list[Tensor] = []
    runtime.step(
        *([inputs] if "0" in chunks else []),
        target=targets if str(last) in chunks else None,
        losses=losses if str(last) in chunks else None,
        return_outputs=False,
    )
    return gradients(chunks), [loss.item() for loss in losses], products.count


def gradients(chunks: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in chunks.named_parameters()}


def run_serially(n_chunks: int, n: int) -> tuple[Gradients, list[float]]:
    """The first n micro-batches by autograd."""
    model = nn.Sequential(*map(chunk_layers, range(n_chunks)))
    inputs, targets = (half.chunk(N_MICROBATCHES)[:n] for half in batch())
    losses = list(map(nn.functional.mse_loss, map(model, inputs), targets))
    for loss in losses:
        (loss / N_MICROBATCHES).backward()
    return gradients(model), [loss.item() for loss in losses]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("mode", "is_split"),
    [
        ("of torch", True),
        pytest.param("ZBH1", True, marks=pytest.mark.slow),
        pytest.param("VPP", False, marks=pytest.mark.slow),
    ],
)
def test_torch_runs_our_split_and_our_schedules(
    pool: Pool, tmp_path: Path, mode: str, is_split: bool
) -> None:
    """Put into its stages by the wrapper for torchtitan."""
    csv, stage_of = "", (0, 1, 1, 0)
    if mode != "of torch":
        schedule = plan(mode, n_stages=N_STAGES, n_microbatches=N_MICROBATCHES)
        csv, stage_of = str(tmp_path / "torch.csv"), schedule.placement.stage_of
        Path(csv).write_text(to_torch_csv(schedule))
    parts = pool.run(run_in_torch, N_STAGES, csv, stage_of, is_split)
    assert all((n_products > 0) == is_split for *_, n_products in parts)
    found = {name: grad for part, *_ in parts for name, grad in part.items()}
    losses = [loss for _, part, _ in parts for loss in part]
    wanted, wanted_losses = run_serially(len(stage_of), N_MICROBATCHES)
    fewer, _ = run_serially(len(stage_of), N_MICROBATCHES - 1)
    assert losses == wanted_losses and found.keys() == wanted.keys()
    for name, grad in found.items():
        assert torch.equal(grad, wanted[name]) and not torch.equal(grad, fewer[name])


# A split module alone; that it has autograd's bits is tested on the whole zoo.


def trained(module: nn.Module, *inputs: Tensor, is_joint: bool = False) -> Any:
    """Run all forwards, then a backward for each, or one for all."""
    losses = [module(x).square().sum() for x in inputs]
    for loss in [torch.stack(losses).sum()] if is_joint else losses:
        loss.backward()
    return module


def assert_same(split: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for p, q in zip(plain.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, **tolerance)


@pytest.mark.parametrize("is_joint", [True, False])
def test_several_forwards_and_backwards_before_the_builder(is_joint: bool) -> None:
    inputs = batch()[0].split(3)
    plain = trained(chunk_layers(0), *inputs, is_joint=is_joint)
    split = trained(SplitModule(chunk_layers(0)), *inputs, is_joint=is_joint)
    assert split.module[2].weight.grad is None
    for _ in range(2):  # nothing is left for the second
        split.dw_builder()()
        assert_same(split, plain, **({} if is_joint else EXACTLY))


def test_a_copy_of_a_split_module_has_none_of_its_work() -> None:
    x, _ = batch()
    plain = trained(chunk_layers(0), x)
    split = trained(SplitModule(chunk_layers(0)), x)
    for copied in (copy.deepcopy(split), pickle.loads(pickle.dumps(split))):
        copied.dw_builder()()
        assert all(p.grad is None for p in copied.parameters())
        trained(copied, x).dw_builder()()
        assert_same(copied, plain, **EXACTLY)
    split.dw_builder()()
    assert_same(split, plain, **EXACTLY)
    with torch.no_grad():
        assert not split(x).requires_grad
