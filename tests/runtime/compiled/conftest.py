"""Compiled parts; all but the slow tests leave Inductor's kernels out."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from plain_graphs import run_plainly
from torch import fx

from zbpp.runtime.compiled import backend


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache of kernels for all tests, and none of another session."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))
    yield
    if before is None:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
    else:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Run finished graphs as they are, operator by operator, and list them."""
    seen: list[fx.GraphModule] = []

    def compile_graph(graph: fx.GraphModule, *args: Any, **about: Any) -> Any:
        seen.append(graph)
        return run_plainly(graph, *args, **about)

    monkeypatch.setattr(backend, "compile_graph", compile_graph)
    return seen
