"""Host time a job, all stages in one process, layers too small to keep a GPU busy."""

import statistics
import time
from collections.abc import Callable

import torch
from gpu.clock import finish
from gpu.sizes import Sizes
from parts.table import Table
from torch import nn
from torch.nn.functional import mse_loss

import zbpp

__all__ = ["measure"]

WIDTH, ROWS = 8, 4
_FIRST = 4
"""Turns that do not count: in them graphs are recorded."""


def measure(sizes: Sizes) -> list[Table]:
    """Host's thread time a job of each mode, beside a plain loop's of a forward or
    backward of one layer; in turns."""
    m, rounds = (4, 2) if sizes.is_tiny else (32, 15)
    steps = {
        f"{mode}, {p} stages{how}": _ours(mode, p, m, sizes.device, graphs=bool(how))
        for p in ((2,) if sizes.is_tiny else (2, 4))
        for mode in ("1F1B", "ZBH1", "ZBV")
        for how in ("", ", CUDA graphs")
    }
    steps["plain loop, 4 layers"] = _plain(4, m, sizes.device)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + _FIRST):
        for name, (step, n_jobs) in steps.items():
            finish(sizes.device)
            began = time.thread_time()
            step()
            if turn >= _FIRST:
                found[name].append((time.thread_time() - began) / n_jobs * 1e6)
    finish(sizes.device)
    rows = []
    for name, times in found.items():
        low, _, high = statistics.quantiles(times, n=4, method="inclusive")
        rows.append([name, statistics.median(times), low, high])
    return [
        Table(
            "Host time a job",
            note=f"A job is an F, B, W or BW of one Linear of width {WIDTH}; all "
            f"stages in this process, {m} micro-batches, no optimizer. No step waits "
            "for the GPU, so this is what issuing takes.",
            columns=["what", "us a job", "lower quartile", "upper"],
            rows=rows,
        )
    ]


def _batch(m: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS * m, WIDTH, device=device)
    return x, torch.randn_like(x)


def _ours(
    mode: str, p: int, m: int, device: torch.device, *, graphs: bool
) -> tuple[Callable[[], object], int]:
    n_chunks = p * (2 if mode == "ZBV" else 1)
    pipeline = zbpp.Pipeline(
        [nn.Linear(WIDTH, WIDTH) for _ in range(n_chunks)],
        loss_fn=mse_loss,
        optimizer=None,
        schedule=mode,
        n_stages=p,
        n_microbatches=m,
        device=device,
        execution=zbpp.Execution(watch=False, cuda_graphs=graphs),
    )
    batch = _batch(m, device)
    kinds = 2 if mode == "1F1B" else 3
    return (lambda: pipeline.step(*batch)), kinds * n_chunks * m


def _plain(n: int, m: int, device: torch.device) -> tuple[Callable[[], object], int]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(n))).to(device)
    x, y = _batch(m, device)
    pairs = list(zip(x.chunk(m), y.chunk(m), strict=True))

    def step() -> None:
        for inputs, targets in pairs:
            (mse_loss(model(inputs), targets) / m).backward()

    return step, 2 * n * m
