"""B + W of compiled blocks against one full backward of the same, compiled as ever.

    python benchmarks/split_compiled.py --runs 40

    full       torch.compile as it is: one backward
    exact      compiled by zbpp: B, then W
    in place   the same with weight gradients added within the products' kernels
    BW         compiled by zbpp, one backward
    eager      not compiled: B, then W
    eager full not compiled: one backward

All take turns in one process, in an order of their own each time, so that a busy
machine slows them alike; figures are medians of ratios to ``full`` of the same turn,
with their quartiles. Memory is counted by the allocator's own events.
"""

import argparse
import copy
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from parts.split_models import Block
from parts.table import Table
from parts.turns import quartiles_of
from torch import Tensor, nn

from zbpp.memory.layers import model_memory
from zbpp.profiling.memory import allocated_by
from zbpp.runtime.backward.hooks import watch
from zbpp.runtime.backward.plan_cache import SplitPlanCache
from zbpp.runtime.backward.split import SplitGraph
from zbpp.runtime.compiled.backend import zbpp
from zbpp.training.llama import Block as LlamaBlock
from zbpp.training.llama import LlamaConfig

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # of torch's memory profiler

Halves = tuple[Callable[[], object], Callable[[], object]]


def llama(width: int, seq: int) -> nn.Module:
    """A block of the model of `zbpp train`."""
    sizes = {"n_heads": max(1, width // 64), "hidden": 8 * width // 3 // 8 * 8}
    return LlamaBlock(LlamaConfig(dim=width, seq=seq, **sizes))


def block(width: int) -> nn.Module:
    """A block as GPT-2 has it."""
    return Block(width, heads=max(1, width // 64))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], torch.dtype]] = {
    "block 64": (partial(block, 64), (1, 16, 64), torch.float32),
    "Llama block 64": (partial(llama, 64, 16), (1, 16, 64), torch.float32),
    "block 256": (partial(block, 256), (1, 128, 256), torch.float32),
    "Llama block 256": (partial(llama, 256, 256), (2, 256, 256), torch.float32),
    "block 512": (partial(block, 512), (2, 256, 512), torch.float32),
    "Llama block 512": (partial(llama, 512, 256), (2, 256, 512), torch.float32),
    "block 256, bf16": (partial(block, 256), (1, 128, 256), torch.bfloat16),
}


class Contender:
    """One way to run a backward.

    Args:
        module: compiled, or not.
        is_split: B and W; else one backward.
        is_exact: see `SplitGraph`.
    """

    def __init__(
        self, module: nn.Module, *, is_split: bool = False, is_exact: bool = True
    ) -> None:
        self.module, self._is_split, self._is_exact = module, is_split, is_exact
        self._plans = SplitPlanCache()

    def forward(self, shape: tuple[int, ...], dtype: torch.dtype) -> Halves:
        """F; return what runs B and W."""
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        watch.look()  # as a stage does, before a forward
        y: Tensor = self.module(x)
        dy = torch.ones_like(y)
        if not self._is_split:
            return partial(_full, [y, dy]), _nothing
        graph = SplitGraph([y], [x], is_exact=self._is_exact, plans=self._plans)
        del y
        return partial(_drop, graph, dy), graph.backward_weight


def _full(ends: list[Tensor]) -> None:
    """Run one backward; the graph is freed in it, as B frees it."""
    y, dy = ends
    ends.clear()
    torch.autograd.backward(y, dy)


def _drop(graph: SplitGraph, dy: Tensor) -> None:
    graph.backward_input(dy)


def _nothing() -> None:
    """Nothing is left for W."""


def contenders(build: Callable[[], nn.Module], dtype: torch.dtype) -> dict[str, Any]:
    """All ways, each with a copy of the module of its own."""
    torch.manual_seed(0)
    first = build().to(dtype)
    stock, exact, in_place, joint, eager, eager_full = (
        copy.deepcopy(first) for _ in range(6)
    )
    ours: Callable[..., Any] = partial(torch.compile, backend=zbpp)
    return {
        "full": Contender(torch.compile(stock)),
        "exact": Contender(ours(exact), is_split=True),
        "in place": Contender(ours(in_place), is_split=True, is_exact=False),
        "BW": Contender(ours(joint)),
        "eager": Contender(eager, is_split=True),
        "eager full": Contender(eager_full),
    }


def measure_time(
    title: str,
    ways: dict[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    runs: int,
) -> None:
    """Print ratios to the full compiled backward, and B's share."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    host: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    for turn in range(runs + 5):
        seconds = {}
        for name in random.sample(list(ways), len(ways)):
            began = time.perf_counter()
            b, w = ways[name].forward(shape, dtype)
            forward = time.perf_counter()
            b()
            middle = time.perf_counter()
            w()
            end = time.perf_counter()
            seconds[name] = end - forward
            if turn >= 5:
                host[name].append((forward - began, middle - forward, end - middle))
        for name in ways if turn >= 5 else ():
            found[name].append(seconds[name] / seconds["full"])
    table = Table(
        f"{title}: time", ("split", "(B+W) / full", "F, us", "B, us", "W, us")
    )
    for name, ratios in found.items():
        halves = (1e6 * statistics.median(x) for x in zip(*host[name], strict=True))
        table.add(name, quartiles_of(ratios), *(f"{us:.0f}" for us in halves))
    table.show()


def measure_memory(
    table: Table, ways: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Add what F, B and W leave, and the peaks through B and W."""
    cpu = torch.device("cpu")
    for name, way in ways.items():
        halves: list[Halves] = []

        def forward(way: Any = way, halves: list[Halves] = halves) -> None:
            halves.append(way.forward(shape, dtype))

        after_f, _ = allocated_by(forward, cpu)
        ((b, w),) = halves
        halves.clear()
        left, peak = allocated_by(b, cpu)
        del b
        after_w, peak_w = allocated_by(w, cpu)
        after_b = after_f + left
        most = (after_f + peak, after_b + peak_w)
        table.add(name, *_kib(after_f, after_b, after_b + after_w, *most))


def _kib(*n_bytes: int | None) -> list[str | None]:
    return [None if one is None else f"{one / 1024:.0f}" for one in n_bytes]


def add_estimate(
    table: Table,
    build: Callable[[], nn.Module],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Add the same of a block between two others, by `zbpp.memory`."""
    x = torch.zeros(shape, dtype=dtype)
    for name, compile in (("exact", "blocks"), ("eager", False)):
        layers = [build().to(dtype) for _ in range(3)]
        how: dict[str, Any] = {"compile": compile}
        own = model_memory(layers, (x, x), nn.functional.mse_loss, **how).whole.layers
        held = own[1].f.left + x.nbytes  # and the gradient of the output
        left = own[1].f.left + own[1].b.left
        most = (own[1].f.left + own[1].b.peak, left + own[1].w.peak)
        table.add(f"{name}, estimated", *_kib(held, left, None, *most))


def main() -> None:
    """Measure all cases, or those whose name contains the given text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--only", default="", help="part of a case's name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    print(f"torch {torch.__version__}, 1 thread")
    for name, (build, shape, dtype) in CASES.items():
        if args.only not in name:
            continue
        ways = contenders(build, dtype)
        runs = args.runs * (10 if shape[-1] == 64 else 1)
        title = f"{name}, {list(shape)}"
        measure_time(title, ways, shape, dtype, runs)
        table = Table(
            f"{title}: KiB", ("split", "after F", "B", "W", "most in B", "in W")
        )
        measure_memory(table, ways, shape, dtype)
        add_estimate(table, build, shape, dtype)
        table.show()


if __name__ == "__main__":
    main()
