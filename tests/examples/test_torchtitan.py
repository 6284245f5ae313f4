"""A pipelining function, wrapped as in torchtitan, runs our plan with our split."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layer_plan import plan_layers
from matmuls import CountMatmuls
from pool import Pool
from torch import Tensor, nn

from zbpp.core import LayerCosts, RequestError, read_schedule, write_schedule
from zbpp.planning import plan
from zbpp.schedules import to_torch_csv

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan_zbpp.py"
N_STAGES, N_MICROBATCHES, BLOCKS, WIDTH = 2, 4, 6, 8


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def modules() -> dict[str, nn.Module]:
    """By the names that torchtitan's language models use."""
    torch.manual_seed(0)
    blocks = {
        f"layers.{i}": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        for i in range(BLOCKS)
    }
    ends = {"norm": nn.LayerNorm(WIDTH), "lm_head": nn.Linear(WIDTH, 16)}
    return {"tok_embeddings": nn.Embedding(16, WIDTH), **blocks, **ends}


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 16, (2, 3 * N_MICROBATCHES), generator=generator)
    return tokens[0], tokens[1]


def torch_pipeline(
    model: dict[str, nn.Module], *, names: list[list[str]], csv: str, placement: Any
) -> tuple[Any, list[nn.Module], bool, bool]:
    """Torch's own stages and schedule, put together as torchtitan does it."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    held = [c for c, stage in enumerate(placement) if stage == dist.get_rank()]
    parts = [nn.Sequential(*(model[name] for name in names[c])) for c in held]
    stages = [
        PipelineStage(part, chunk, len(placement), torch.device("cpu"))
        for chunk, part in zip(held, parts, strict=True)
    ]
    runtime = _PipelineScheduleRuntime(
        stages, N_MICROBATCHES, nn.functional.cross_entropy, scale_grads=False
    )
    runtime._load_csv(csv)
    return runtime, parts, 0 in held, len(placement) - 1 in held


def gradients(model: dict[str, nn.Module]) -> dict[str, Tensor]:
    named = nn.ModuleDict({name.replace(".", "_"): m for name, m in model.items()})
    return {name: p.grad for name, p in named.named_parameters() if p.grad is not None}


def run(plan_file: str, csv: str) -> tuple[dict[str, Tensor], bool]:
    """Gradients of one rank, and whether any product waited for W."""
    example = load()
    model = modules()
    schedule = read_schedule(plan_file)
    pipelining = example.with_split_backward(torch_pipeline)
    runtime, parts, first, last = pipelining(
        model,
        names=example.module_names(plan_file),
        csv=csv,
        placement=schedule.placement.stage_of,
    )
    waited = []
    for stage in runtime._stages:
        build = stage.dw_builder

        def counted(build: Any = build) -> Any:
            run = build()

            def w() -> None:
                with CountMatmuls() as products:
                    run()
                waited.append(products.count)

            return w

        stage.dw_builder = counted
    inputs, targets = batch()
    runtime.step(
        *([inputs] if first else []),
        **({"target": targets, "losses": []} if last else {}),
    )
    assert not any("module." in name for p in parts for name, _ in p.named_parameters())
    return gradients(model), sum(waited) > 0


@pytest.mark.dist
def test_a_wrapped_pipeline_gives_the_serial_gradients(
    pool: Pool, tmp_path: Path
) -> None:
    layers = LayerCosts(n_layers=BLOCKS + 2, f=(0.2, *(1.0,) * BLOCKS, 1.5))
    planned = plan_layers(
        "ZBV", layers, n_stages=N_STAGES, n_microbatches=N_MICROBATCHES
    ).schedule
    file, csv = tmp_path / "plan.json", tmp_path / "torch.csv"
    write_schedule(planned, file)
    csv.write_text(to_torch_csv(planned))
    parts = pool.run(run, N_STAGES, str(file), str(csv))
    assert all(deferred for _, deferred in parts)
    found = {name: g for own, _ in parts for name, g in own.items()}
    model = modules()
    whole = nn.Sequential(*model.values())
    for x, target in zip(*(t.chunk(N_MICROBATCHES) for t in batch()), strict=True):
        nn.functional.cross_entropy(whole(x), target).backward()
    serial = gradients(model)
    assert found.keys() == serial.keys()
    assert all(torch.equal(found[name], g) for name, g in serial.items())


def test_names_follow_the_split(tmp_path: Path) -> None:
    layers = LayerCosts(n_layers=5, f=(1.0, 1.0, 1.0, 1.0, 2.0))
    planned = plan_layers(
        "1F1B", layers, n_stages=2, n_microbatches=2, split=(3, 2)
    ).schedule
    write_schedule(planned, tmp_path / "plan.json")
    assert load().module_names(tmp_path / "plan.json") == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "norm", "lm_head"],
    ]


def test_a_plan_without_a_split_is_refused(tmp_path: Path) -> None:
    planned = plan("1F1B", n_stages=2, n_microbatches=2)
    write_schedule(planned, tmp_path / "plan.json")
    with pytest.raises(RequestError, match="has no split"):
        load().module_names(tmp_path / "plan.json")
