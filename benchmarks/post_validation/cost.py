"""Cost of being able to roll an optimizer step back.

    python benchmarks/post_validation/cost.py rollback --rounds 15

compares, on one thread, three ways to step AdamW (fused) and roll it back:

    deferred   a copy of the parameters, a first step with a temporary copy of the
               state, and a second step to commit
    snapshot   a copy of parameters and optimizer state, made in the step and dropped
               after it
    inverse    no copy: the formula solved for the old values, as published

The ways take turns, round after round; every ratio is to the plain step of its round.
The rest of a valid step (``later``) is done at V.
The gain of speculative steps in a pipeline is the other half of the question, and has
its own file, ``post_validation/gain.py``.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))

from parts.options import read_options
from parts.table import Table

from zbpp.runtime.optim.rollback import DeferredStep, Rollback, SnapshotStep

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1


@dataclass(frozen=True)
class Cost:
    """Options of the measurement."""

    parameters: int = 21_000_000
    """About so many numbers in all, fp32."""
    width: int = 768
    """Of the transformer blocks that hold them; 0: 80 tensors of odd sizes."""
    rounds: int = 15
    """Each way once a round."""
    only: str | None = None
    """Run one way once, and print the process's peak memory (for `memory`)."""


def block(width: int) -> list[tuple[int, ...]]:
    """The parameters of a transformer block: attention, feed-forward, two norms."""
    linears = [(3 * width, width), (width, width), (4 * width, width)]
    linears.append((width, 4 * width))
    biases = [(rows,) for rows, _ in linears]
    return [*linears, *biases, *([(width,)] * 4)]


def odd_sizes(parameters: int) -> list[tuple[int, ...]]:
    """Those of 80 vectors, with which no vectorized kernel comes out even."""
    each = parameters // 80
    return [(each // 4,), (each + 1,), (3 * each // 4,), (2 * each - 1,)] * 20


def make(options: Cost) -> torch.optim.AdamW:
    """An optimizer that has stepped once, so that its state is there."""
    torch.manual_seed(0)
    shapes = odd_sizes(options.parameters)
    if options.width:
        n_blocks = max(1, round(options.parameters / (12 * options.width**2)))
        shapes = block(options.width) * n_blocks
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 0.1
    optimizer = torch.optim.AdamW(
        parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )
    optimizer.step()
    return optimizer


class Inverse:
    """Solve AdamW's formula for the old values; no copy, and not the old bits."""

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        self._optimizer = optimizer

    def take(self) -> None:
        """Step."""
        self._optimizer.step()

    def commit(self) -> None:
        """Nothing."""

    @torch.no_grad()
    def undo(self) -> None:
        """Go backwards through the formula, for all parameters at once."""
        optimizer = self._optimizer
        params = optimizer.param_groups[0]["params"]
        states = [optimizer.state[p] for p in params]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        gradients = [p.grad for p in params]
        step = float(states[0]["step"])
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, (1 - BETAS[1] ** step) ** 0.5)
        torch._foreach_add_(roots, EPS)
        torch._foreach_addcdiv_(params, means, roots, LR / (1 - BETAS[0] ** step))
        torch._foreach_div_(params, 1 - LR * DECAY)
        torch._foreach_add_(means, gradients, alpha=BETAS[0] - 1)
        torch._foreach_div_(means, BETAS[0])
        torch._foreach_addcmul_(squares, gradients, gradients, BETAS[1] - 1)
        torch._foreach_div_(squares, BETAS[1])
        for state in states:
            state["step"] -= 1


WAYS: dict[str, Callable[[torch.optim.AdamW], Rollback]] = {
    "deferred": DeferredStep,
    "snapshot": SnapshotStep,
    "inverse": Inverse,
}


def timed(action: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


def held(optimizer: torch.optim.AdamW) -> list[Tensor]:
    """Parameters and state, copied."""
    return [
        value.detach().clone()
        for p in optimizer.param_groups[0]["params"]
        for value in (p, *optimizer.state[p].values())
    ]


def share_of_same_bits(optimizer: torch.optim.AdamW, way: Rollback) -> float:
    """Of all numbers, after a step has been rolled back."""
    before = held(optimizer)
    way.take()
    way.undo()
    after = held(optimizer)
    same = sum(
        int((a == b).sum()) for a, b in zip(before, after, strict=True) if a.dim()
    )
    return same / sum(a.numel() for a in before if a.dim())


def peak_mib(options: Cost, way: str) -> float:
    """Largest resident memory of a process that steps and commits (Linux)."""
    command = [
        sys.executable,
        __file__,
        "rollback",
        "--only",
        way,
        "--parameters",
        str(options.parameters),
        "--width",
        str(options.width),
    ]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(answer.stdout)


def run_once(options: Cost, way: str) -> None:
    """For `peak_mib`: two steps of one way, or of none."""
    optimizer = make(options)
    chosen = WAYS[way](optimizer) if way in WAYS else None
    for _ in range(2):
        if chosen is None:
            optimizer.step()
        else:
            chosen.take()
            chosen.commit()
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(int(x.split()[1]) / 1024 for x in lines if x.startswith("VmHWM:")))


def copier(optimizer: torch.optim.AdamW) -> Callable[[], object]:
    """Copies the parameters to the same place each time: the least that undoes."""
    params = optimizer.param_groups[0]["params"]
    copies = [torch.empty_like(p) for p in params]

    @torch.no_grad()
    def copy() -> None:
        for target, parameter in zip(copies, params, strict=True):
            target.copy_(parameter)

    return copy


def rollback(options: Cost) -> None:
    """Measure time, memory and exactness; print a table."""
    torch.set_num_threads(1)
    if options.only is not None:
        run_once(options, options.only)
        return
    optimizer = make(options)
    ways = {name: make_way(optimizer) for name, make_way in WAYS.items()}
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in (*ways, "copy p")}
    steps, copy = [], copier(optimizer)
    for _ in range(options.rounds + 2):
        step = timed(optimizer.step)
        steps.append(step)
        rows["copy p"].append((timed(copy) / step, 0.0, 0.0))
        for name, way in ways.items():
            way.take()
            way.commit()
            early = timed(way.take)
            later = timed(way.commit)
            way.take()
            undo = timed(way.undo)
            rows[name].append((early / step - 1, later / step, undo / step))
    exact = {name: share_of_same_bits(optimizer, way) for name, way in ways.items()}
    plain = peak_mib(options, "none")
    size = sum(p.nbytes for p in optimizer.param_groups[0]["params"]) / 2**20
    table = Table(
        f"fused AdamW step: {statistics.median(steps[2:]):.1f} ms; p: {size:.0f} MiB",
        ("way", "speculative - 1", "later", "undo", "memory", "same"),
    )
    for name, ratios in rows.items():
        columns = list(zip(*ratios[2:], strict=True))  # two rounds to warm up
        memory = ""
        if name in ways:
            beyond = peak_mib(options, name) - plain
            memory = f"{beyond / size:.2f} p"
        same = f"{exact[name]:.1%}" if name in ways else ""
        table.add(name, *map(spread, columns), memory, same)
    table.show()


def spread(values: tuple[float, ...]) -> str:
    """Median, smallest and largest ratio to a step."""
    if not any(values):
        return ""
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


COMMANDS = {"rollback": rollback}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        raise SystemExit(f"choose one of: {', '.join(COMMANDS)}")
    COMMANDS[sys.argv[1]](read_options(Cost, words=sys.argv[2:]))
