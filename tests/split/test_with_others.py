"""The split backward with tensor parallelism, and experts of transformers."""

import pytest
import torch
from pool import Pool
from split_runs import IN_ORDER, Numbered, check
from torch import nn
from zoo import Case, Fn, lin, tokens

from zbpp.runtime import split_forward


def tensor_parallel() -> list[int]:
    """Check such layers, and count the messages in B and W."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(),
    }
    mesh = init_device_mesh("cpu", (2,))

    def build() -> nn.Module:
        layers = nn.LayerNorm(6), lin(6, 8), nn.ReLU(), lin(8, 6), lin(6, 2)
        return parallelize_module(nn.Sequential(*layers), mesh, plan)

    case = Case(build, "1.weight 3.weight 4.weight")
    check(case, orders=())
    graph = split_forward(Numbered(case), torch.tensor(0))
    with CommDebugMode() as in_b:
        graph.backward_input()
    with CommDebugMode() as in_w:
        graph.backward_weight()
    return [in_b.get_total_counts(), in_w.get_total_counts()]


@pytest.mark.dist
def test_tensor_parallel_layers_are_split(pool: Pool) -> None:
    for n_in_b, n_in_w in pool.run(tensor_parallel, 2):
        assert n_in_b > 0 and n_in_w == 0, "W needs no other process"


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("kind", ["eager", "batched_mm", "grouped_mm"])
def test_the_experts_of_mixtral_run_in_w(kind: str) -> None:
    from tiny_hf import tiny

    def build() -> nn.Module:
        model = tiny("mixtral", 2)
        model.set_experts_implementation(kind)
        return Fn(lambda m, ids: m.model(input_ids=ids).logits, model=model)

    waits = [name for name, _ in build().named_parameters() if ".experts." in name]
    assert len(waits) == 4
    check(Case(build, " ".join(waits), tokens), orders=(IN_ORDER,))
