"""The split backward beside torch.compile, tensor parallelism and packing hooks."""

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from zbpp.runtime.split_backward import SplitGraph

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
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_part_runs_in_b_and_the_rest_is_split(backend: str) -> None:
    compiled = torch.compile(nn.Linear(6, 6), backend=backend)
    module = nn.Sequential(nn.Linear(6, 6), compiled, nn.Linear(6, 6))
    plain, (split, where) = both_ways(module, torch.randn(4, 6))
    assert all(map(torch.equal, split, plain))
    assert [n for n, text in where.items() if text == "W"] == ["0.weight", "2.weight"]


def tensor_parallel() -> tuple[list[Tensor], Found]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 2))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(layers, init_device_mesh("cpu", (2,)), plan)
    return both_ways(layers, torch.randn(4, 6))


@pytest.mark.dist
def test_tensor_parallel_layers_run_in_b(pool: Pool) -> None:
    for plain, (split, where) in pool.run(tensor_parallel, 2):
        assert all(map(torch.equal, split, plain))
        assert [name for name, text in where.items() if text == "W"] == ["3.weight"]


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
