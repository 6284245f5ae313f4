"""Processes that begin with other parameters, or read other samples, are refused."""

import re
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import zbpp

pytestmark = pytest.mark.dist

WIDTH, STEPS = 4, 4
Case = dict[str, Any]


def outcome(case: Case) -> str:
    """Train with one thing wrong, or nothing; the error's words, or how many steps."""
    mesh = None
    if case.get("mesh"):
        mesh = zbpp.mesh(stages=2, **{case["mesh"]: 2})
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]
    dims = mesh.mesh_dim_names if mesh is not None else ("pp",)
    at = mesh.get_coordinate() if mesh is not None else (torch.distributed.get_rank(),)
    place = dict(zip(dims, at, strict=True))
    first = layers[1].weight.detach().clone()
    if place.get(case.get("parameters")) == 1:
        with torch.no_grad():
            layers[1].weight += 1e-6
    pipeline = flat_pipeline(
        layers,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        schedule="ZBH1",
        n_microbatches=2,
        mesh=mesh,
        shard=case.get("shard", "none"),
    )
    if case.get("loads"):
        weight = layers[1].weight
        if isinstance(weight, DTensor):
            first = distribute_tensor(first, weight.device_mesh, weight.placements)
        with torch.no_grad():
            weight.copy_(first)
    n = 0
    try:
        for n in range(STEPS):
            pipeline.step(*batch(n, place, case))
    except zbpp.RequestError as error:
        return f"step {n}: {error}"
    finally:
        pipeline.close()
    return f"{n + 1} steps"


def batch(step: int, place: dict[str, int], case: Case) -> tuple[Any, Any]:
    """The same on all processes but for what the case says."""
    both: list[Tensor | None] = []
    for name in ("inputs", "targets"):
        seed = 2 * step + (name == "targets")
        if place.get(case.get(name)) == 1:
            seed += 100
        generator = torch.Generator().manual_seed(seed)
        both.append(torch.randn(4, WIDTH, generator=generator))
    return both[0], both[1]


def outcomes(cases: list[Case]) -> list[str]:
    return [outcome(case) for case in cases]


REFUSED: list[tuple[Case, str]] = [
    (
        {"mesh": "data_parallel", "parameters": "dp"},
        r"step 0: layers\.1\.weight: parameters that differ between the replicas on "
        r"ranks 0 and 1, .* mesh=",
    ),
    *(
        (
            {"mesh": "data_parallel", "parameters": "dp", "shard": shard},
            r"step 0: layers\.1\.weight: parameters that differ between the replicas",
        )
        for shard in ("optimizer", "parameters")
    ),
    (
        {"mesh": "tensor_parallel", "parameters": "tp"},
        r"step 0: layers\.1\.weight: plain parameters that differ .* 'tp', .*DTensors",
    ),
    (
        {"mesh": "tensor_parallel", "inputs": "tp", "targets": "tp"},
        r"step 0: ranks 0 and 1 are neighbours along 'tp' and read other inputs",
    ),
    (
        {"mesh": "tensor_parallel", "targets": "tp"},
        r"step 0: ranks 2 and 3 are neighbours along 'tp' and read other targets",
    ),
]
FINE: list[Case] = [
    {"mesh": "data_parallel"},
    {"mesh": "tensor_parallel"},
    {"mesh": "data_parallel", "inputs": "dp", "targets": "dp"},
    {"mesh": "data_parallel", "parameters": "dp", "loads": True},
    {"mesh": "data_parallel", "shard": "gradients"},
    {"mesh": "data_parallel", "shard": "parameters", "parameters": "dp", "loads": True},
]


def test_what_differs_is_named(pool: Pool) -> None:
    cases = [case for case, _ in REFUSED]
    for found in pool.run(outcomes, 4, cases + FINE):
        for (_, words), text in zip(REFUSED, found, strict=False):
            assert re.match(words, text), text
        assert found[len(REFUSED) :] == [f"{STEPS} steps"] * len(FINE)
