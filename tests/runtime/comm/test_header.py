"""A value that is no block of numbers is refused in words, by the stage that has it."""

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from small_model import refusal
from torch import Tensor, nn

from zbpp.core import Value, What
from zbpp.pipeline import Pipeline
from zbpp.runtime.comm.channels import HEADER, HEADER_REST, KINDS, tag
from zbpp.runtime.comm.header import (
    HEADER_BYTES,
    MOST_TENSORS,
    from_blocks,
    pack,
    rest_bytes,
    spec_of,
    to_blocks,
    unpack,
)
from zbpp.runtime.support.errors import ShapeError
from zbpp.runtime.values import as_tensors

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
    slots = [HEADER, *range(1, MOST_TENSORS + 1), HEADER_REST, KINDS]
    values = [Value(what, c, m) for what in What for c in range(3) for m in range(3)]
    wanted = [v for v in values if v.what in (What.ACTIVATION, What.GRADIENT)]
    tags = [
        tag(value, slot, training=training)
        for value in wanted
        for slot in slots
        for training in (True, False)
    ]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("n", [0, 1, 3, MOST_TENSORS])
def test_a_header_of_any_length_comes_as_it_was_sent(n: int) -> None:
    value = {"many": [torch.ones(2, i) for i in range(n)], "text": 'a "quoted" \u2603'}
    spec = spec_of(VALUE, as_tensors(value | {"none": None, "rate": float("inf")}))
    first, rest = to_blocks(pack(VALUE, spec))
    assert first.nbytes == HEADER_BYTES
    assert rest_bytes(first) == (0 if rest is None else rest.nbytes)
    assert (rest is not None) == (n == MOST_TENSORS)
    assert unpack(from_blocks(first, rest), VALUE) == spec


def test_too_many_tensors() -> None:
    spec = spec_of(VALUE, (torch.tensor(1.0),) * (MOST_TENSORS + 1))
    with pytest.raises(ShapeError, match="251 tensors are too many for one message"):
        pack(VALUE, spec)
