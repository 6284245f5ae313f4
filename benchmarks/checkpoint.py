"""A save in the background: how long it blocks, of how long it takes.

    python benchmarks/checkpoint.py [--millions 50] [--saves 6] [--folder DIR]

A model of Linears with AdamW state (12 bytes a parameter) in one process. Each save
comes after a step; the first one is told apart, as its host memory is new. Blocked is
the time of the call `pipeline.save`.
"""

import argparse
import statistics
import tempfile
import time

import torch
from torch import nn

import zbpp

WIDTH = 1024


def build(millions: float) -> zbpp.Pipeline:
    """Layers of 1.05 M parameters each."""
    torch.manual_seed(0)
    n = max(2, round(millions * 1e6 / WIDTH**2))
    return zbpp.Pipeline(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n))),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, fused=True),
        schedule="1F1B",
        n_stages=1,
        n_microbatches=1,
    )


def main() -> None:
    """Measure, and print medians with the smallest and the largest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=50.0)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    pipeline = build(options.millions)
    x = torch.randn(8, WIDTH)
    n = sum(p.numel() for _, p in pipeline.named_parameters())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        blocked, taken = [], []
        for _ in range(options.saves + 1):
            pipeline.step(x, x)
            pipeline.synchronize()
            begun = time.perf_counter()
            pipeline.save(folder, keep=1)
            blocked.append(time.perf_counter() - begun)
            pipeline.finish_saving()
            taken.append(time.perf_counter() - begun)
        pipeline.close()
    shares = [one / whole for one, whole in zip(blocked, taken, strict=True)]
    print(f"{n:,} parameters, {12 * n / 2**20:,.0f} MiB of state")
    for name, values in (("blocked s", blocked), ("save s", taken), ("share", shares)):
        first, *rest = values
        print(
            f"{name:>10}: {statistics.median(rest):.3f} "
            f"({min(rest):.3f}-{max(rest):.3f}), the first {first:.3f}"
        )


if __name__ == "__main__":
    main()
