"""The split backward beside torch.compile, tensor parallelism and packing hooks."""

from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from zoo import Checkpointed

from zbpp.core import RequestError
from zbpp.runtime import SplitGraph, SplitModule, split_forward
from zbpp.runtime.backward.ends import end_of
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.parallel.bind import bind_parallel
from zbpp.runtime.parallel.mesh import Place
from zbpp.runtime.policies import DataParallel
from zbpp.runtime.stage import Stage

Found = tuple[list[Tensor], dict[str, str]]


def both_ways(module: nn.Module, x: Tensor) -> tuple[list[Tensor], Found]:
    """Gradients of one backward; those of B and W, and where they were computed."""
    module(x).sum().backward()
    plain = take_gradients(module)
    y = module(x)
    graph = SplitGraph([y])
    report = graph.report()
    graph.backward_input(torch.ones_like(y))
    graph.backward_weight()
    where = {name: report[p] for name, p in module.named_parameters()}
    return plain, (take_gradients(module), where)


def take_gradients(module: nn.Module) -> list[Tensor]:
    found = []
    for p in module.parameters():
        assert p.grad is not None
        found.append(p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad)
        p.grad = None
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_a_checkpoint_may_hold_a_compiled_part() -> None:
    compiled = torch.compile(nn.Linear(6, 6), backend="aot_eager")
    inner = nn.Sequential(nn.Linear(6, 6), compiled)
    module = nn.Sequential(nn.Linear(6, 6), Checkpointed(inner), nn.Linear(6, 6))
    plain, (split, where) = both_ways(module, torch.randn(4, 6))
    assert all(map(torch.equal, split, plain))
    waits = [n for n, text in where.items() if text == "W"]
    assert waits == ["0.weight", "1.inner.0.weight", "2.weight"]


@pytest.mark.parametrize("orders", [("B0 W0 B1 W1"), ("B0 B1 W0 W1")])
def test_bf16_parameters_may_have_fp32_gradients(orders: str) -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).bfloat16()
    for p in module.parameters():
        p.grad_dtype = torch.float32
    inputs = [torch.randn(32, 64).bfloat16() for _ in range(2)]
    for x in inputs:
        module(x).sum().backward()
    plain = take_gradients(module)
    graphs = [SplitGraph([module(x)]) for x in inputs]
    for text in orders.split():
        if text[0] == "B":
            graphs[int(text[1])].backward_input(torch.ones(32, 64).bfloat16())
        else:
            graphs[int(text[1])].backward_weight()
    split = take_gradients(module)
    assert all(g.dtype == torch.float32 for g in split)
    assert all(map(torch.equal, split, plain))
    rounded = [g.bfloat16().float() for g in split]
    assert not all(map(torch.equal, split, rounded)), "summed in bf16"


def tensor_parallel(sequence: bool) -> tuple[list[Tensor], Found, list[int]]:
    """Also the messages that B and W have sent."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.LayerNorm(6),
        nn.Linear(6, 8),
        nn.ReLU(),
        nn.Linear(8, 6),
        nn.Linear(6, 2),
    )
    plan = {
        "1": ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate()),
        "3": RowwiseParallel(),
    }
    if sequence:
        plan["0"] = SequenceParallel()
    parallelize_module(layers, init_device_mesh("cpu", (2,)), plan)
    x = torch.randn(3, 4, 6, requires_grad=True)
    found = both_ways(layers, x)
    y = layers(x)
    graph = SplitGraph([y], [x])
    with CommDebugMode() as in_b:
        graph.backward_input(torch.ones_like(y))
    with CommDebugMode() as in_w:
        graph.backward_weight()
    return *found, [in_b.get_total_counts(), in_w.get_total_counts()]


@pytest.mark.dist
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_layers_are_split(pool: Pool, sequence: bool) -> None:
    for plain, (split, where), counts in pool.run(tensor_parallel, 2, sequence):
        assert all(map(torch.equal, split, plain))
        waits = [name for name, text in where.items() if text == "W"]
        assert waits == ["1.weight", "3.weight", "4.weight"]
        assert counts[0] > 0 and counts[1] == 0


def test_own_saved_tensor_hooks_unpack_once() -> None:
    unpacked = []

    def unpack(x: Tensor) -> Tensor:
        unpacked.append(x)
        return x

    module = nn.Linear(6, 6)
    for is_split in (False, True):
        unpacked.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            y = module(torch.randn(4, 6))
        if is_split:
            graph = SplitGraph([y])
            graph.backward_input(torch.ones_like(y))
            graph.backward_weight()
        else:
            y.sum().backward()
        assert len(unpacked) == 1


def data_parallel() -> dict[str, str]:
    """The refusal of each wrapper of data parallelism."""
    said = {}
    for name, wrap in {
        "DistributedDataParallel": DistributedDataParallel,
        "fully_shard": fully_shard,
        "replicate": replicate,
        "fully_shard inside": lambda m: nn.Sequential(fully_shard(m)),
    }.items():
        wrapped = wrap(nn.Sequential(nn.Linear(6, 6)))
        with pytest.raises(RequestError) as refused:
            split_forward(wrapped, torch.randn(4, 6))
        said[name] = str(refused.value)
        chunks = [Chunk(0, 3, (wrapped,))]
        if name in ("DistributedDataParallel", "replicate"):
            with pytest.raises(RequestError, match=r"layers\.3.*wrap them by `repl"):
                Stage(
                    chunks,
                    n_chunks=1,
                    loss_fn=lambda y, _: y.mean(),
                    device=torch.device("cpu"),
                )
        else:
            with pytest.raises(RequestError, match="give the mesh"):
                bind_parallel(chunks, Place(None, (0,), 0, 1), DataParallel())
    outside = DistributedDataParallel(SplitModule(nn.Linear(6, 6)))
    with pytest.raises(RequestError) as refused:
        outside(torch.randn(4, 6))
    said["DistributedDataParallel outside"] = str(refused.value)
    return said


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")  # torch's own
def test_data_parallel_wrappers_are_refused_by_name(pool: Pool) -> None:
    for said in pool.run(data_parallel, 2):
        for name, text in said.items():
            assert f"is wrapped by {name.split()[0]}" in text
        assert "the module.0 is" in said["fully_shard inside"]
    split_forward(nn.Sequential(nn.Linear(6, 6)), torch.randn(4, 6))


def test_the_end_of_a_function_in_python_holds_its_graph() -> None:
    """Python's part of such a node does not own it, so torch adds one that does."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy * 2

    x = torch.ones(2, requires_grad=True)
    in_python, built_in, leaf = map(end_of, (Double.apply(x), x * 2, x))
    assert in_python.ownership_token is not None
    assert built_in.ownership_token is leaf.ownership_token is None
    for end in in_python, built_in, leaf:
        torch.autograd.backward([end], [torch.ones(2)])
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]
