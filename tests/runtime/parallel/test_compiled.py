"""Compiled blocks under `fully_shard`, beside replicas, and cut over processes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mesh_runs import train
from plain_graphs import run_plainly
from pool import Pool
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import zbpp
from zbpp.runtime import SplitGraph
from zbpp.runtime.compiled import backend

STEPS = 2
MODES = ("1F1B", "ZBH1")
OVER_TWO = {"data_parallel": 1, "tensor_parallel": 2}


@contextmanager
def kernels_left_out(*, cut: bool = True) -> Iterator[list[fx.GraphModule]]:
    """Compile by torch up to the finished graphs, and list those."""
    seen: list[fx.GraphModule] = []

    def as_it_is(graph: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        seen.append(graph)
        return run_plainly(graph, inputs)

    torch._dynamo.reset()
    before = backend.compile_graph, backend.cut_weights
    backend.compile_graph = as_it_is
    if not cut:
        backend.cut_weights = lambda *_: []
    try:
        yield seen
    finally:
        backend.compile_graph, backend.cut_weights = before
        torch._dynamo.reset()


def train_compiled(how: str) -> tuple[Any, Any, Any, int]:
    """Losses and norms of two modes compiled, of one uncompiled; graphs compiled."""
    with kernels_left_out() as graphs:
        whole, split = (
            train(mode, how, steps=STEPS, compile="blocks").results
            for mode in ("1F1B", "ZBH1")
        )
    return whole, split, train("ZBH1", how, steps=STEPS).results, len(graphs)


@pytest.mark.dist
@pytest.mark.slow
def test_compiled_blocks_train_as_others_do(pool: Pool) -> None:
    for whole, split, eager, graphs in pool.run(train_compiled, 4, "resharded"):
        assert graphs >= 2  # a forward and a backward, but for kernels
        assert len(split) == STEPS
        for one, other, plain in zip(whole, split, eager, strict=True):
            assert one == other
            assert other == pytest.approx(plain, rel=1e-6)


def train_over_two() -> tuple[Any, Any, Any]:
    """Trainings of tensor-parallel blocks: split in two modes, uncut, uncompiled."""
    tp = zbpp.mesh(stages=2, **OVER_TWO)["tp"]  # another one would compile once more
    how: dict[str, Any] = {"how": "bare", "steps": STEPS, "tp": tp, **OVER_TWO}
    with kernels_left_out() as graphs:
        split = [train(x, compile="blocks", **how) for x in MODES[:1]]
        n_graphs = len(graphs)
        split += [train(x, compile="blocks", **how) for x in MODES[1:]]
        assert len(graphs) == n_graphs > 0
    with kernels_left_out(cut=False):
        uncut = train("ZBH1", compile="blocks", **how)
    return split, uncut, train("ZBH1", **how)


@pytest.mark.dist
@pytest.mark.slow
def test_compiled_blocks_over_two_processes_are_split(pool: Pool) -> None:
    answers = pool.run(train_over_two, 4)
    wanted = parameters(uncut for _, uncut, _ in answers)
    for i, mode in enumerate(MODES):
        found = parameters(split[i] for split, *_ in answers)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), mode
        assert sum(len(split[i].waits) for split, *_ in answers) == 2 * (7 * 2 + 1)
    for (whole, split), uncut, eager in answers:
        assert whole.results == split.results == uncut.results
        assert split.waits == eager.waits
        assert not any("up" in name or "down" in name for name in uncut.waits)
        for one, other in zip(uncut.results, eager.results, strict=True):
            assert one == pytest.approx(other, rel=1e-6)


def parameters(found: Iterable[Any]) -> dict[str, Tensor]:
    return {name: p for one in found for name, p in one.parameters.items()}


class Summed(nn.Module):
    """Each process has rows of x: of ``one``'s gradient it makes a summand.

    A frozen parameter goes before: it has no gradient among the backward's results.
    """

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts = distribute_tensor(torch.randn(6, 6), mesh, [Shard(0)])
        self.one = nn.Parameter(distribute_tensor(torch.randn(6, 6), mesh))
        self.other, self.mesh = nn.Parameter(parts), mesh
        frozen = distribute_tensor(torch.randn(6, 6), mesh)
        self.frozen = nn.Parameter(frozen, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)
        y = (rows @ self.frozen @ self.one).tanh()
        y = y.redistribute(placements=[Replicate()])
        return (y @ self.other.t()).redistribute(placements=[Replicate()]).to_local()


def sum_partly() -> tuple[list[str], bool]:
    """The places of the gradients, and the difference from those of a backward."""
    mesh = init_device_mesh("cpu", (2,))
    ours, plain = Summed(mesh), Summed(mesh)
    with kernels_left_out():
        calls = [torch.compile(one, backend=backend.zbpp) for one in (ours, plain)]
        for rows in (1, 2):
            x = torch.full(
                (2, 6), 0.1 * (rows + mesh.get_local_rank())
            ).requires_grad_()
            calls[1](x).sum().backward()
            graph = SplitGraph([y := calls[0](x)], [x])
            report = graph.report()
            graph.backward_input(torch.ones_like(y))
            graph.backward_weight()
    pairs = zip((ours.one, ours.other), (plain.one, plain.other), strict=True)
    grads = [(p.grad.full_tensor(), q.grad.full_tensor()) for p, q in pairs]
    return [report[p] for p in (ours.one, ours.other)], all(
        torch.equal(*pair) for pair in grads
    )


@pytest.mark.dist
@pytest.mark.slow
def test_a_sum_over_processes_that_is_not_made_yet_stays_in_b(pool: Pool) -> None:
    where = ["B: its gradient is not sharded as it is", "W"]
    assert pool.run(sum_partly, 2) == [(where, True)] * 2
