"""The split backward with tensor parallelism, wrappers of replicas, transformers."""

from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zbpp
from zbpp.core import RequestError
from zbpp.runtime import SplitGraph, SplitModule, split_forward


def tensor_parallel() -> tuple[bool, set[str], list[int]]:
    """Equal to a backward? What waits, and the numbers of messages in B and W."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.LayerNorm(6),
        nn.Linear(6, 8),
        nn.ReLU(),
        nn.Linear(8, 6),
        nn.Linear(6, 2),
    )
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(),
    }
    parallelize_module(layers, init_device_mesh("cpu", (2,)), plan)
    x: Any = torch.randn(3, 4, 6, requires_grad=True)

    def taken() -> list[Tensor]:
        grads: list[Any] = [p.grad for p in layers.parameters()]
        layers.zero_grad()
        return [getattr(g, "full_tensor", lambda g=g: g)() for g in grads]

    layers(x).sum().backward()
    wanted = [*taken(), x.grad]
    y = layers(x)
    graph = SplitGraph([y], [x])
    report = graph.report()
    with CommDebugMode() as in_b:
        (dx,) = graph.backward_input(torch.ones_like(y))
    with CommDebugMode() as in_w:
        graph.backward_weight()
    found = [*taken(), dx]
    waits = {name for name, p in layers.named_parameters() if report.get(p) == "W"}
    is_equal = all(map(torch.equal, found, wanted))
    return is_equal, waits, [in_b.get_total_counts(), in_w.get_total_counts()]


@pytest.mark.dist
def test_tensor_parallel_layers_are_split(pool: Pool) -> None:
    for is_equal, waits, (n_in_b, n_in_w) in pool.run(tensor_parallel, 2):
        assert is_equal and waits == {"1.weight", "3.weight", "4.weight"}
        assert n_in_b > 0 and n_in_w == 0, "W needs no other process"


def refusals() -> dict[str, list[str]]:
    """What each wrapper of data parallelism is refused with: alone, in a pipeline."""
    from torch.distributed._composable import replicate
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def words(call: Any) -> str:
        with pytest.raises(RequestError) as refused:
            call()
        return str(refused.value)

    def in_a_pipeline(wrapped: nn.Module) -> None:
        zbpp.Pipeline(
            [wrapped, nn.Linear(6, 6)],
            "ZBH1",
            loss_fn=nn.functional.mse_loss,
            optimizer=None,
            n_stages=2,
            n_microbatches=2,
        )

    x, found = torch.randn(4, 6), {}
    for name, wrap in {
        "DistributedDataParallel": DistributedDataParallel,
        "replicate": replicate,
        "fully_shard": fully_shard,
        "fully_shard inside": lambda m: nn.Sequential(fully_shard(m)),
    }.items():
        wrapped = wrap(nn.Sequential(nn.Linear(6, 6)))
        found[name] = [
            words(lambda m=wrapped: split_forward(m, x)),
            words(lambda m=wrapped: in_a_pipeline(m)),
        ]
    outside = DistributedDataParallel(SplitModule(nn.Linear(6, 6)))
    found["DistributedDataParallel outside"] = [words(lambda: outside(x))]
    return found


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")  # torch's own
def test_wrappers_of_replicas_are_refused_by_name(pool: Pool) -> None:
    for found in pool.run(refusals, 2):
        for name, (alone, *in_pipeline) in found.items():
            wrapper = name.split()[0]
            assert f"is wrapped by {wrapper}" in alone
            for text in in_pipeline:
                is_sharded = wrapper == "fully_shard"
                assert ("mesh" if is_sharded else f"wrapped by {wrapper}") in text
        assert "the module.0 is" in found["fully_shard inside"][0]
    split_forward(nn.Sequential(nn.Linear(6, 6)), torch.randn(4, 6))


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.xdist_group("hf")
@pytest.mark.parametrize("kind", ["eager", "batched_mm", "grouped_mm"])
def test_the_experts_of_mixtral_wait(kind: str) -> None:
    from tiny_hf import batch_of, tiny

    def gradients() -> list[Tensor]:
        found = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    model = tiny("mixtral", 2)
    model.set_experts_implementation(kind)
    batches = [batch_of("mixtral", 2, seed=i) for i in range(3)]
    for batch in batches:
        model(**batch).loss.backward()
    wanted = gradients()
    graphs = [SplitGraph([model(**batch).loss]) for batch in batches]
    report = graphs[0].report()
    for graph in graphs:
        graph.backward_input()
    for graph in graphs:
        graph.backward_weight()
    assert all(map(torch.equal, gradients(), wanted))
    waits = {name for name, p in model.named_parameters() if report.get(p) == "W"}
    experts = {name for name, _ in model.named_parameters() if ".experts." in name}
    assert len(experts) == 4 and experts < waits
