"""Compiled blocks under `fully_shard`, and beside replicas."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from mesh_runs import train
from plain_graphs import run_plainly
from pool import Pool
from torch import fx

from zbpp.runtime.compiled import backend

STEPS = 2


@contextmanager
def kernels_left_out() -> Iterator[list[fx.GraphModule]]:
    """Compile by torch up to the finished graphs, and list those."""
    seen: list[fx.GraphModule] = []

    def as_it_is(graph: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        seen.append(graph)
        return run_plainly(graph, inputs)

    torch._dynamo.reset()
    before = backend.compile_graph
    backend.compile_graph = as_it_is
    try:
        yield seen
    finally:
        backend.compile_graph = before
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
@pytest.mark.parametrize("how", ["optimizer", "resharded"])
def test_compiled_blocks_train_as_others_do(how: str, pool: Pool) -> None:
    for whole, split, eager, graphs in pool.run(train_compiled, 4, how):
        assert graphs >= 2  # a forward and a backward, but for kernels
        assert len(split) == STEPS
        for one, other, plain in zip(whole, split, eager, strict=True):
            assert one == other
            assert other == pytest.approx(plain, rel=1e-6)
