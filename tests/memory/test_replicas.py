"""Bytes of replicas that divide optimizer state, gradients and parameters (ZeRO)."""

import json
import subprocess
import sys

import pytest
import torch
from commands import PATIENCE_S
from torch import nn

from zbpp.core import RequestError
from zbpp.memory import StageEstimate, estimate
from zbpp.memory.estimate import Steps, estimate_modes
from zbpp.memory.layers import model_memory
from zbpp.memory.model import default_optimizer
from zbpp.memory.optimizer import part_shape

WIDTH, N_LAYERS, N_REPLICAS = 128, 4, 64
N_PARAMETERS = WIDTH * WIDTH + WIDTH  # of a layer
SHARDS = ("none", "optimizer", "gradients", "parameters")


@pytest.fixture(scope="module")
def estimated():
    """Estimate the stages of one model, traced once."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(N_LAYERS)]
    batch = torch.zeros(4, WIDTH), torch.zeros(4, WIDTH)
    memory = model_memory(layers, batch, nn.functional.mse_loss)

    def of(shard: str, mode: str = "ZBV", n: int = N_REPLICAS) -> list[StageEstimate]:
        steps = Steps(default_optimizer, data_parallel=n, shard=shard)
        found = estimate_modes(memory, steps, [mode], n_stages=2, n_microbatches=4)
        return list(found.modes[mode])

    return of


@pytest.fixture(scope="module")
def stages(estimated) -> dict[str, list[StageEstimate]]:
    return {shard: estimated(shard) for shard in SHARDS}


@pytest.mark.parametrize("shard", SHARDS)
def test_bytes_a_parameter_are_those_of_zero(stages, shard) -> None:
    """AdamW in 32 bits keeps 4 + 4 + 8; replicas with parts a 64th of it."""
    steps = 4 * 2 * N_LAYERS // 2  # AdamW counts the steps of each parameter
    for stage in stages[shard]:
        kept = stage.parameters + stage.gradients + stage.optimizer - steps
        n = N_PARAMETERS * N_LAYERS // 2
        assert kept == 16 * n / (1 if shard == "none" else N_REPLICAS)


def test_what_is_whole_for_a_while_counts_in_the_peak(stages) -> None:
    peaks = {shard: max(s.peak for s in own) for shard, own in stages.items()}
    layer, stage = 4 * N_PARAMETERS, 4 * N_PARAMETERS * N_LAYERS // 2
    for shard in ("optimizer", "gradients"):  # both chunks are gathered at once
        assert all(s.gathered_peak == stage for s in stages[shard])
    assert all(s.gathered_peak == layer for s in stages["parameters"])
    assert all(s.gathered_peak == 0 for s in stages["none"])
    assert peaks["parameters"] < peaks["gradients"] < peaks["optimizer"] < peaks["none"]
    assert peaks["optimizer"] > 2 * stage  # whole parameters and whole gradients
    assert peaks["gradients"] - peaks["parameters"] <= stage
    assert peaks["parameters"] > layer + stage / 2  # a layer's, and a chunk's gradients


def test_a_gather_of_one_chunk_ends_with_its_last_b(estimated) -> None:
    (first, _), (plain, _) = (estimated(s, "ZBH1") for s in ("optimizer", "none"))
    assert first.gathered_peak == 4 * N_PARAMETERS * N_LAYERS // 2
    assert first.peak < plain.peak
    in_passes, _ = estimated("parameters", "ZBH1")
    assert in_passes.gathered_peak == 4 * N_PARAMETERS  # of a layer, not of its chunk


def test_one_replica_alone_divides_nothing(estimated) -> None:
    assert estimated("none", n=1) == estimated("none", n=2)
    sizes = {"n_stages": 1, "n_microbatches": 1, "shard": "parameters"}
    with pytest.raises(RequestError, match="needs replicas to shard among"):
        estimate([nn.Linear(2, 2)], (torch.zeros(1, 2), None), None, **sizes)


def test_rows_that_do_not_divide_are_rounded_up(estimated) -> None:
    """The first replica keeps the most."""
    assert part_shape((10, 7), 4) == (3, 7)
    assert part_shape((3,), 64) == (1,)
    assert part_shape((), 4) == ()
    stage = estimated("parameters", n=96)[0]
    rows = 2  # of 128 on 96 replicas
    assert stage.parameters == 4 * (rows * WIDTH + rows) * N_LAYERS // 2


SHARDED = """
import json
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("dp",))


def held(rows):
    layers = [nn.Linear(64, 64), nn.Linear(64, rows)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    parameters = [p for layer in layers for p in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    layers[1](layers[0](torch.randn(2, 64))).sum().backward()
    optimizer.step()
    states = [s for state in optimizer.state.values() for s in state.values()]
    parts = parameters, [p.grad for p in parameters], [s for s in states if s.dim()]
    return [sum(4 * t.to_local().numel() for t in part) for part in parts]


print(json.dumps({rows: held(rows) for rows in (128, 100, 10)}))
"""


@pytest.mark.slow
def test_parts_are_those_of_fully_shard_to_the_byte() -> None:
    """The first of 64 processes, by torch's own wrapper: also of uneven rows."""
    command = [sys.executable, "-c", SHARDED]
    found = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert found.returncode == 0, found.stderr
    for rows, (parameters, gradients, state) in json.loads(found.stdout).items():
        layers = [nn.Linear(64, 64), nn.Linear(64, int(rows))]
        batch = torch.zeros(2, 64), torch.zeros(2, int(rows))
        memory = model_memory(layers, batch, nn.functional.mse_loss)
        steps = Steps(default_optimizer, data_parallel=64, shard="gradients")
        modes = estimate_modes(memory, steps, ["1F1B"], n_stages=1, n_microbatches=2)
        (stage,) = modes.modes["1F1B"]
        assert (stage.parameters, stage.gradients) == (parameters, gradients)
        assert stage.optimizer == state + 4 * 4  # AdamW counts steps
        n = sum(p.numel() for layer in layers for p in layer.parameters())
        whole = parameters + gradients + state
        assert (whole * 64 == 16 * n) == (rows == "128")
