"""The mode auto beside every fixed mode: is it ever behind the best of them?

    python benchmarks/auto.py emulated --stages 4    # unequal layers that sleep
    python benchmarks/auto.py real                   # 2 stages that compute

Emulated, auto and the fixed modes are planned for the same costs per layer under the
same memory limit, each with its own best split, and run in turns. Real, auto is given
an example and measures its layers first; the fixed modes are run as they are, with the
default split. `judge.py`, which shares no code with zbpp, replays the plans.
"""

import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from parts.options import read_options
from parts.runs import in_processes, judged, run_zbpp
from parts.table import Table
from parts.turns import Runs, spread_of, take_turns

from zbpp.core import (
    LayerCosts,
    RequestError,
    write_layers,
    write_schedule,
)
from zbpp.models import layers_from
from zbpp.pipeline import Pipeline, plan_model
from zbpp.planning import PlanRequest, make_plan
from zbpp.training.llama import LlamaConfig, build_layers, cross_entropy
from zbpp.training.setup import split_layers

FIXED = ("1F1B", "ZBH1", "ZBH2", "ZBV", "VHalf", "VMin")


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """Layers that sleep; memory of p micro-batches of a stage's layers."""

    stages: int = 4
    layer_ms: float = 8.0
    runs: int = 3
    steps: int = 6

    def run(self) -> None:
        """Plan, judge, run in turns, print."""
        p, n = self.stages, 4 * self.stages + 1
        work = [0.5, *[1.0] * (n - 2), 3.0]
        work[n // 2] = 2.0
        ms = tuple(self.layer_ms * one for one in work)
        layers = LayerCosts(
            n, f=ms, b=ms, w=tuple(0.6 * one for one in ms),
            m_b=tuple(work), m_w=tuple(one / 2 for one in work), m_fixed=0.1,
            comm=self.layer_ms / 10, memory_limit=1.1 * sum(work) * 0.75,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "layers.json"
            write_layers(layers, path)
            plans = self._plan(layers, Path(folder))
            found = take_turns(
                plans,
                self.runs,
                lambda mode, file: self._measure(path, plans[mode], file),
            )
        show(found, f"emulated, p={p}, layers of {self.layer_ms:g} ms")

    def _plan(self, layers: LayerCosts, folder: Path) -> dict[str, Path]:
        files = {}
        request = PlanRequest(
            schedule="auto",
            n_stages=self.stages,
            n_microbatches=3 * self.stages,
            costs=layers,
        )
        best = make_plan(replace(request, recompute="none", by_mode=True))
        print(best.line, flush=True)
        plans = {"auto": best}
        for mode in FIXED:
            try:
                plans[mode] = make_plan(replace(request, schedule=mode))
            except RequestError as error:
                print(f"{mode}: {error}")
        for mode, planned in plans.items():
            files[mode] = folder / f"{mode}.json"
            write_schedule(planned.schedule, files[mode])
            verdict = judged(planned.schedule, planned.costs)
            print(f"{mode}: span {verdict.span:.1f} ms, peak {max(verdict.peaks):.2f}")
        return files

    def _measure(self, layers: Path, plan: Path, metrics: Path) -> None:
        run_zbpp(
            "train", "--emulate", layers, "--steps", self.steps,
            "--pipeline_schedule_mode", plan, "--metrics", metrics,
            "--timeout_s", 300, "--enable_optimizer_post_validation",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Real:
    """Two processes that train a small Llama; its head is as heavy as some blocks."""

    dim: int = 256
    n_blocks: int = 8
    samples: int = 2
    seq: int = 256
    microbatches: int = 8
    runs: int = 3
    steps: int = 12

    def run(self) -> None:
        """Run in turns, print."""
        run = in_processes(compute, self, 2)
        found = take_turns(("auto", *FIXED), self.runs, run)
        show(found, f"real compute, p=2: {self}, load {os.getloadavg()[0]:.1f}")


def compute(options: Real, mode: str, file: str) -> None:
    """One process's share of one run."""
    torch.set_num_threads(1)
    size = options.n_blocks, options.dim, options.seq
    model = LlamaConfig(n_blocks=size[0], dim=size[1], seq=size[2], hidden=3 * size[1])
    m = options.microbatches
    tokens = torch.randint(256, (m * options.samples, options.seq + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    layers = layers_from(partial(build_layers, model), n_layers=model.n_layers)
    asked: dict[str, Any] = {"n_stages": 2, "n_microbatches": m, "device": "cpu"}
    trains: dict[str, Any] = {
        "loss_fn": cross_entropy,
        "optimizer": lambda ps: torch.optim.AdamW(ps, fused=True),
    }
    if mode == "auto":
        asked |= {"example": batch, "memory": "4GiB", **trains}
    else:
        n_chunks = 4 if mode.startswith(("ZBV", "V")) else 2
        asked["split"] = split_layers(model, n_chunks)
    planned = plan_model(layers, mode, **asked)
    pipeline = Pipeline(layers, planned, clip_grad_norm=1.0, device="cpu", **trains)
    for _ in range(8):  # the watcher of auto has looked by then
        pipeline.step(*batch)
    pipeline.synchronize()
    pipeline.gather(None)
    start = time.perf_counter()
    for _ in range(options.steps):
        pipeline.step(*batch)
    pipeline.synchronize()
    pipeline.gather(None)
    step_ms = 1e3 * (time.perf_counter() - start) / options.steps
    if pipeline.rank == 0:
        said = {"step_ms": step_ms, "chosen": pipeline.plan.line}
        Path(file).write_text(json.dumps(said))
    pipeline.close()


def show(found: Runs, title: str) -> None:
    """Print medians, and each mode's ratio to the best fixed one of the same run."""
    table = Table(title, ("mode", "ms", "over the best fixed mode"))
    steps = {mode: [run["step_ms"] for run in runs] for mode, runs in found.items()}
    middle = {mode: statistics.median(runs) for mode, runs in steps.items()}
    best = min((mode for mode in found if mode != "auto"), key=middle.__getitem__)
    for mode, runs in steps.items():
        ratios = [a / b for a, b in zip(runs, steps[best], strict=True)]
        table.add(mode, f"{middle[mode]:.1f}", spread_of(ratios))
    table.show()


def main() -> None:
    """Run one of the two."""
    read_options(Emulated, Real).run()


if __name__ == "__main__":
    main()
