"""W reads no memory that a gathered parameter had in B."""

from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss

import zbpp
from zbpp.runtime import WeightQueue

N_LAYERS, N_MICROBATCHES, WIDTH = 5, 2, 8
SHARDS = [("optimizer", False), ("parameters", False), ("parameters", True)]


class Queries(nn.Module):
    """Multiplies parameters by parameters; one factor of them is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(6, WIDTH))
        self.fixed = nn.Parameter(torch.randn(6, WIDTH), requires_grad=False)
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        keys, values = self.key(self.queries), self.value(self.fixed)
        values = values + self.conv(self.fixed.mT[None])[0].mT
        return x + torch.softmax(x @ keys.mT, -1) @ values


def train(mode: str, shard: Any, alternating: bool) -> dict[str, Tensor]:
    """Whole parameters after a step, without the frozen ones."""
    torch.manual_seed(0)
    layers = [Queries() for _ in range(N_LAYERS)]
    mesh = zbpp.mesh(stages=1, data_parallel=2)
    with zbpp.Pipeline(
        layers, mode, loss_fn=mse_loss, device="cpu", n_microbatches=N_MICROBATCHES,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        mesh=zbpp.DataParallel(
            mesh=mesh, shard=shard, alternating_buffers=alternating
        ),
    ) as pipeline:  # fmt: skip
        inputs, targets = torch.randn(2, 2 * N_MICROBATCHES, 4, WIDTH)
        pipeline.step(inputs, targets)
        return {
            name: p.full_tensor() if isinstance(p, DTensor) else p.detach().clone()
            for name, p in pipeline.named_parameters()
            if p.requires_grad
        }


def split_is_full(shard: str, alternating: bool) -> bool:
    """Compare B and W with backwards in one."""
    expected = train("1F1B", shard, alternating)
    found = train("ZBH1", shard, alternating)
    return all(torch.equal(found[name], expected[name]) for name in expected)


def without_copies(shard: str, alternating: bool) -> bool:
    """The same if W reads what B has read."""
    own = WeightQueue.own
    WeightQueue.own = lambda queue, tensor: tensor  # type: ignore[method-assign]
    try:
        return split_is_full(shard, alternating)
    finally:
        WeightQueue.own = own  # type: ignore[method-assign]


@pytest.mark.dist
@pytest.mark.parametrize(("shard", "alternating"), SHARDS)
def test_w_has_operands_of_its_own(pool: Pool, shard: str, alternating: bool) -> None:
    assert pool.run(split_is_full, 2, shard, alternating) == [True, True]


@pytest.mark.dist
def test_operands_in_a_buffer_of_others_would_show(pool: Pool) -> None:
    assert pool.run(without_copies, 2, "parameters", True) == [False, False]
