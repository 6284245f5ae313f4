"""B + W against one full backward: time and memory, ours and torch's own split.

    python benchmarks/split_backward.py --runs 15

All techniques take turns on the same module in one process, so that a busy machine
slows them alike; each figure is a median of ratios to the full backward of its turn.
Freed memory stays with the process, as on a GPU; `--trim` lets glibc hand large blocks
back to the system at once, and fetching them again is then a part of what is measured.
"""

import argparse
import ctypes
import gc
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from parts.split_models import MODELS, SMALL
from parts.table import Table
from parts.turns import quartiles_of
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zbpp.runtime.backward.hooks import watch
from zbpp.runtime.backward.plan_cache import SplitPlanCache
from zbpp.runtime.backward.split import SplitGraph

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

Halves = tuple[Callable[[], None], Callable[[], None]]


_plans: WeakKeyDictionary[nn.Module, SplitPlanCache] = WeakKeyDictionary()


def plans_of(module: nn.Module) -> SplitPlanCache:
    """The memory of a chunk's graphs, as a stage has it."""
    return _plans.setdefault(module, SplitPlanCache())


def full(module: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Halves:
    """One backward; nothing is left for W."""
    return (lambda: torch.autograd.backward(y, dy)), (lambda: None)


def ours(module: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Halves:
    """The split of zbpp."""
    graph = SplitGraph([y], [x], plans=plans_of(module))
    return (lambda: _drop(graph.backward_input(dy))), graph.backward_weight


def ours_in_place(module: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Halves:
    """The same with weight gradients added within the product's kernel."""
    graph = SplitGraph([y], [x], is_exact=False, plans=plans_of(module))
    return (lambda: _drop(graph.backward_input(dy))), graph.backward_weight


def torchs(module: nn.Module, x: Tensor, y: Tensor, dy: Tensor) -> Halves:
    """The split of torch.distributed.pipelining."""
    groups: list[Any] = []

    def b() -> None:
        _, found = stage_backward_input([y], [dy], [x], module.parameters())
        groups.extend(found)

    def w() -> None:
        stage_backward_weight(module.parameters(), groups)
        groups.clear()

    return b, w


TECHNIQUES = {"full": full, "ours": ours, "in place": ours_in_place, "torch": torchs}


def _drop(thing: object) -> None:
    """Forget a result at once."""


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside that are still alive."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: dict[int, Any] = {}
        for p in module.parameters():  # what is there already is not counted
            self._seen[p.untyped_storage()._cdata] = None
            if p.grad is not None:
                self._seen[p.grad.untyped_storage()._cdata] = None

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        """Run the operation and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return result

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._seen:
            size = storage.nbytes()
            self.live += size
            self._seen[key] = weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self.live -= size
        del self._seen[key]


def start(
    module: nn.Module, shape: tuple[int, ...], technique: Any
) -> tuple[float, Halves]:
    """F; return its seconds and the two half backwards."""
    x = torch.randn(shape, requires_grad=True)
    watch.look()  # as a stage does, before a forward
    began = time.perf_counter()
    y = module(x)
    f_s = time.perf_counter() - began
    return f_s, technique(module, x, y, torch.ones_like(y))


def measured(
    module: nn.Module, shape: tuple[int, ...], runs: int, *, is_first: bool
) -> dict[str, tuple[list[float], list[float]]]:
    """Return ratios to the full backward, and B's shares, of each technique.

    Ours and torch's take turns with the full one, but not with each other: torch's
    registers hooks, and ours looks for hooks wherever there are new ones.

    Args:
        module: to differentiate.
        shape: of its input.
        runs: that count, after two that do not.
        is_first: gradients are None before each backward.
    """
    found: dict[str, tuple[list[float], list[float]]] = {}
    for names in (("full", "ours", "in place"), ("full", "torch")):
        for turn in range(runs + 2):
            seconds = {}
            for name in sorted(names, key=lambda n: hash((n, turn))):
                if is_first:
                    module.zero_grad()
                _, (b, w) = start(module, shape, TECHNIQUES[name])
                began = time.perf_counter()
                b()
                middle = time.perf_counter()
                w()
                seconds[name] = (middle - began, time.perf_counter() - began)
            for name, (b_s, both_s) in seconds.items() if turn >= 2 else ():
                ratios, shares = found.setdefault(name, ([], []))
                ratios.append(both_s / seconds["full"][1])
                shares.append(b_s / both_s)
    return found


def add_times(
    table: Table,
    module: nn.Module,
    shape: tuple[int, ...],
    runs: int,
    *,
    is_first: bool = False,
) -> None:
    """Add the ratios to a table; other arguments as of `measured`."""
    found = measured(module, shape, runs, is_first=is_first)
    for name in ("ours", "in place", "torch"):
        ratios, shares = found[name]
        share = f"{statistics.median(shares):.0%}"
        gradients = "first" if is_first else "added"
        table.add(gradients, name, quartiles_of(ratios), share)


def memory_of(name: str, module: nn.Module, shape: tuple[int, ...]) -> Table:
    """Live MiB after F, B and W, and the peak through B and through W."""
    table = Table(
        f"{name}: MiB",
        ("split", "after F", "B", "W", "most in B", "in W", "held for W"),
    )
    for name, technique in TECHNIQUES.items():
        module.zero_grad(set_to_none=False)
        gc.collect()
        with LiveBytes(module) as bytes_:
            _, (b, w) = start(module, shape, technique)
            after = [bytes_.live]
            b()
            gc.collect()
            after.append(bytes_.live)
            peak = bytes_.peak
            w()
            del b, w
            gc.collect()
            after.append(bytes_.live)
        least = None
        if name == "ours":
            _, (b, w) = start(module, shape, technique)
            graph = w.__self__  # type: ignore[attr-defined]
            b()
            least = graph.held_bytes()
            w()
        found = (*after, peak, bytes_.peak, least)
        table.add(name, *(x if x is None else f"{x / 2**20:.1f}" for x in found))
    return table


def main() -> None:
    """Measure all models, or those whose name contains the given text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--trim", action="store_true", help="leave glibc as it is")
    parser.add_argument("--only", default="", help="part of a model's name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if sys.platform == "linux" and not args.trim:
        libc = ctypes.CDLL(None)
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            libc.mallopt(option, 2**30)
    print(f"torch {torch.__version__}, 1 thread")
    for name, (build, shape) in MODELS.items():
        if args.only not in name:
            continue
        torch.manual_seed(0)
        module = build()
        start(module, shape, full)[1][0]()  # gradients exist from here on
        runs = args.runs * (20 if name in SMALL else 1)
        table = Table(f"{name}: time", ("gradients", "split", "(B+W) / full", "B"))
        add_times(table, module, shape, runs)
        add_times(table, module, shape, runs, is_first=True)
        table.show()
        start(module, shape, full)[1][0]()
        memory_of(name, module, shape).show()


if __name__ == "__main__":
    main()
