"""Bytes of replicas that divide optimizer state, gradients and parameters (ZeRO)."""

import pytest
import torch
from torch import nn

from zbpp.core import RequestError
from zbpp.memory import estimate
from zbpp.memory.estimate import StageEstimate, Steps, estimate_modes
from zbpp.memory.layers import model_memory
from zbpp.memory.model import default_optimizer
from zbpp.memory.parts import part_shape

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


@pytest.mark.parametrize(
    ("shard", "whole"),
    [("none", 16), ("optimizer", 8), ("gradients", 4), ("parameters", 0)],
)
def test_bytes_a_parameter_are_those_of_zero(stages, shard, whole) -> None:
    """AdamW in 32 bits: 4 + 4 + 8; divided by 64 what the replicas divide."""
    steps = 4 * 2 * N_LAYERS // 2  # AdamW counts the steps of each parameter
    for stage in stages[shard]:
        kept = stage.parameters + stage.gradients + stage.optimizer - steps
        n = N_PARAMETERS * N_LAYERS // 2
        assert kept == n * (whole + (16 - whole) / N_REPLICAS)


def test_what_is_gathered_and_not_yet_added_up_counts_in_the_peak(stages) -> None:
    peaks = {shard: max(s.peak for s in own) for shard, own in stages.items()}
    n_bytes = 4 * N_PARAMETERS * N_LAYERS // 2  # of the parameters of a stage
    for stage in stages["parameters"]:
        assert stage.gathered_peak == n_bytes  # both chunks are gathered at once
    assert all(s.gathered_peak == 0 for s in stages["optimizer"])
    # sums after every W leave one chunk's gradients whole at a time, and its sum
    assert peaks["gradients"] < peaks["optimizer"] < peaks["none"]
    assert peaks["optimizer"] - peaks["gradients"] < n_bytes
    # once a step, parameters and gradients of a stage are there as a whole
    assert peaks["parameters"] > 2 * n_bytes


def test_one_chunk_a_stage_frees_its_parameters_before_its_sum(estimated) -> None:
    (first, _), (plain, _) = (estimated(s, "ZBH1") for s in ("parameters", "none"))
    n_bytes = 4 * N_PARAMETERS * N_LAYERS // 2
    assert first.gathered_peak == n_bytes
    assert first.peak < plain.peak


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
