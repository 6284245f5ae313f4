"""A value that is no block of numbers is refused in words, by the stage that has it."""

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from small_model import refusal
from torch import Tensor, nn

from zbpp.core import Value, What
from zbpp.pipeline import Pipeline
from zbpp.runtime.comm.channels import tag
from zbpp.runtime.comm.header import HEADER_LENGTH, pack, spec_of
from zbpp.runtime.support.errors import ShapeError

VALUE = Value(What.ACTIVATION, 0, 3)


class Distributed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return DTensor.from_local(x, mesh, [Replicate()], run_check=False)


def hand_on_a_dtensor() -> str:
    layers = [nn.Sequential(nn.Linear(4, 4), Distributed()), nn.Linear(4, 4)]
    pipeline = Pipeline(
        layers, loss_fn=nn.functional.mse_loss, optimizer=None, schedule="1F1B",
        n_microbatches=2,
    )  # fmt: skip
    data = torch.ones(4, 4)
    if pipeline.rank == 0:
        dist.barrier()  # a mesh is made by all
        return refusal(pipeline.step, data, data)
    from torch.distributed.device_mesh import init_device_mesh

    dist.barrier()
    init_device_mesh("cpu", (2,))
    with pytest.raises(RuntimeError) as caught:
        pipeline.step(data, data)
    return str(caught.value)


@pytest.mark.dist
def test_a_dtensor_between_stages(pool: Pool) -> None:
    for message in pool.run(hand_on_a_dtensor, 2):
        assert "a DTensor cannot be sent between stages; hand on a plain one" in message


def test_a_sparse_tensor() -> None:
    with pytest.raises(ShapeError, match="layout sparse_coo cannot be sent"):
        spec_of(VALUE, (torch.ones(2, 2).to_sparse(),))


def test_parameters_and_plain_tensors_may_be_sent() -> None:
    spec = spec_of(VALUE, (torch.ones(2), nn.Parameter(torch.ones(3, 4))))
    assert spec.shapes == ((2,), (3, 4)) and spec.needs_grad == (False, True)


def test_tags_differ_for_as_many_tensors_as_a_header_holds() -> None:
    most = (HEADER_LENGTH - 4) // 3
    pack(VALUE, spec_of(VALUE, (torch.tensor(1.0),) * most))
    values = [Value(what, c, m) for what in What for c in range(3) for m in range(3)]
    wanted = [v for v in values if v.what in (What.ACTIVATION, What.GRADIENT)]
    tags = [
        tag(value, slot, training=training)
        for value in wanted
        for slot in range(most + 1)
        for training in (True, False)
    ]
    assert len(set(tags)) == len(tags)
