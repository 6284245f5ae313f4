"""B + W against one full backward: time and memory, of zbpp's split and torch's.

    taskset -c 1 python benchmarks/split.py --runs 25
    python benchmarks/split.py --device cuda --only block

All techniques take turns on the same module in one process, so that a busy machine
slows them alike; each figure is a median of ratios to the full backward of its turn.
Freed memory stays with the process, as on a GPU; `--trim` leaves glibc as it is, which
returns large blocks to the system, and fetching them again is then measured too.
"""

import argparse
import ctypes
import gc
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from parts import quartiles, show
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from zbpp.runtime.backward.plan import PlanCache
from zbpp.runtime.backward.split import SplitGraph, WeightQueue

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h

Halves = tuple[Callable[[], None], Callable[[], None]]
_SMALL = "Linear x8, width 64"  # takes less than a millisecond, so more runs


class Block(nn.Module):
    """A transformer block; its attention is one kernel, or products and a softmax."""

    def __init__(
        self, width: int, heads: int = 8, *, is_fused: bool = True, dropout: float = 0
    ) -> None:
        super().__init__()
        self.is_fused, self.dropout = is_fused, dropout
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        parts = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        if self.is_fused:
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            shares = scores.masked_fill(later, float("-inf")).softmax(-1)
            y = functional.dropout(shares, self.dropout) @ v
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Checkpointed(nn.Module):
    """Recomputes its module in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Call the module."""
        return checkpoint(self.inner, x, use_reentrant=False)


class Experts(nn.Module):
    """Four feed-forward experts; each token goes to the best one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        rows = x.flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            chosen = (best == i).nonzero().flatten()
            part = expert(rows[chosen]) * scores[chosen, i, None]
            out = out.index_add(0, chosen, part.to(out.dtype))
        return x + out.view_as(x)


class JointExperts(nn.Module):
    """The same without a bias, all experts in one weight for each product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.up = nn.Parameter(torch.randn(4, 2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(4, width, 2 * width) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        rows = x.flatten(0, 1)
        scores = self.router(rows).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(rows)
        for i in range(4):
            chosen = (best == i).nonzero().flatten()
            hidden = functional.gelu(functional.linear(rows[chosen], self.up[i]))
            part = functional.linear(hidden, self.down[i]) * scores[chosen, i, None]
            out = out.index_add(0, chosen, part)
        return x + out.view_as(x)


def narrow() -> nn.Module:
    """Linears whose time is mostly that of the host."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


def mlp(width: int) -> nn.Module:
    """Four Linears."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers)


def conv_net() -> nn.Module:
    """Four convolutions with norms."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers)


def blocks(n: int, width: int = 512, **options: Any) -> nn.Module:
    """Transformer blocks."""
    return nn.Sequential(*(Block(width, **options) for _ in range(n)))


def four_blocks() -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """Equal layers, for `zbpp bench --model split:four_blocks`."""
    torch.manual_seed(0)
    return (
        blocks(4),
        (torch.randn(1, 256, 512), torch.randn(1, 256, 512)),
        functional.mse_loss,
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP x4": (lambda: mlp(1024), (512, 1024)),
    "block x4, micro-batch 1": (lambda: blocks(4), (1, 256, 512)),
    "block x4, micro-batch 2": (lambda: blocks(4), (2, 256, 512)),
    "block x4, softmax": (
        lambda: blocks(4, is_fused=False),
        (1, 256, 512),
    ),
    "block x4, softmax, dropout": (
        lambda: blocks(4, is_fused=False, dropout=0.1),
        (1, 256, 512),
    ),
    "block x2, sequence 1024": (lambda: blocks(2, 256), (1, 1024, 256)),
    "block x4, checkpointed": (
        lambda: nn.Sequential(*(Checkpointed(Block(512)) for _ in range(4))),
        (2, 256, 512),
    ),
    "conv net": (conv_net, (8, 32, 64, 64)),
    "experts": (lambda: Experts(512), (4, 512, 512)),
    "Linear x8, width 64": (narrow, (16, 64)),
    "experts in one weight": (lambda: JointExperts(512), (4, 512, 512)),
}


_plans: WeakKeyDictionary[nn.Module, PlanCache] = WeakKeyDictionary()


def plans_of(module: nn.Module) -> PlanCache:
    """The memory of a chunk's graphs, as a stage has it."""
    return _plans.setdefault(module, PlanCache())


def full(
    module: nn.Module, x: Tensor, y: Tensor, dy: Tensor, queue: WeightQueue
) -> Halves:
    """One backward; nothing is left for W."""
    return (lambda: torch.autograd.backward(y, dy)), (lambda: None)


def ours(
    module: nn.Module, x: Tensor, y: Tensor, dy: Tensor, queue: WeightQueue
) -> Halves:
    """The split of zbpp."""
    graph = SplitGraph([y], [x], queue, plans=plans_of(module))
    return (lambda: _drop(graph.backward_input(dy))), graph.backward_weight


def ours_in_place(
    module: nn.Module, x: Tensor, y: Tensor, dy: Tensor, queue: WeightQueue
) -> Halves:
    """The same with weight gradients added within the product's kernel."""
    graph = SplitGraph([y], [x], queue, is_exact=False, plans=plans_of(module))
    return (lambda: _drop(graph.backward_input(dy))), graph.backward_weight


def torchs(
    module: nn.Module, x: Tensor, y: Tensor, dy: Tensor, queue: WeightQueue
) -> Halves:
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


def start(module: nn.Module, x: Tensor, technique: Any) -> Halves:
    """F; return the two half backwards."""
    x = torch.randn_like(x, requires_grad=True)
    y = module(x)
    return technique(module, x, y, torch.ones_like(y), WeightQueue())


def now(device: torch.device) -> float:
    """The clock, when the device has done all its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def measured(
    module: nn.Module, x: Tensor, runs: int, *, is_first: bool
) -> dict[str, list[float]]:
    """Ratios to the full backward, by technique; two turns do not count.

    Ours and torch's take turns with the full one, but not with each other: torch's
    registers hooks, and ours looks for hooks wherever there are new ones.

    Args:
        module: to differentiate.
        x: as its input.
        runs: that count.
        is_first: gradients are None before each backward.
    """
    found: dict[str, list[float]] = {}
    for names in (("full", "ours", "in place"), ("full", "torch")):
        for turn in range(runs + 2):
            seconds = {}
            for name in sorted(names, key=lambda n: hash((n, turn))):
                if is_first:
                    module.zero_grad()
                b, w = start(module, x, TECHNIQUES[name])
                began = now(x.device)
                b()
                w()
                seconds[name] = now(x.device) - began
            for name in names[1:] if turn >= 2 else ():
                found.setdefault(name, []).append(seconds[name] / seconds["full"])
    return found


def memory_of(module: nn.Module, x: Tensor) -> list[tuple[object, ...]]:
    """Live MiB after F, B and W, and the peak through B and through W."""
    rows = []
    for name, technique in TECHNIQUES.items():
        module.zero_grad(set_to_none=False)
        gc.collect()
        with LiveBytes(module) as bytes_:
            b, w = start(module, x, technique)
            found = [bytes_.live]
            b()
            gc.collect()
            found += [bytes_.live, bytes_.peak]
            w()
            del b, w
            gc.collect()
            found += [bytes_.live, bytes_.peak]
        rows.append((name, *(f"{one / 2**20:.1f}" for one in found)))
    return rows


def main() -> None:
    """Measure all models, or those whose name contains the given text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--trim", action="store_true", help="leave glibc as it is")
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if sys.platform == "linux" and not args.trim:
        libc = ctypes.CDLL(None)
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            libc.mallopt(option, 2**30)
    print(f"torch {torch.__version__}, 1 thread")
    times, held = [], []
    for name, (build, shape) in MODELS.items():
        if args.only not in name:
            continue
        torch.manual_seed(0)
        with torch.device(args.device):
            module, x = build(), torch.empty(shape)
            start(module, x, full)[0]()  # gradients exist from here on
            runs = args.runs * (20 if name == _SMALL else 1)
            for is_first in (False, True):
                found = measured(module, x, runs, is_first=is_first)
                cells = (quartiles(found[one]) for one in ("ours", "in place", "torch"))
                times.append((name, "first" if is_first else "added", *cells))
            start(module, x, full)[0]()
            held += [(name, *row) for row in memory_of(module, x)]
    columns = ("model", "gradients", "ours", "in place", "torch")
    show("(B + W) / full backward", columns, times)
    columns = ("model", "split", "after F", "B", "most in B", "W", "most in W")
    show("MiB", columns, held)


if __name__ == "__main__":
    main()
