"""Profile, plan, run: is a step as long as it was predicted?

    python benchmarks/profile_plan_run.py emulated --stages 4     # or 8
    python benchmarks/profile_plan_run.py real                  # 2 stages that compute

For each mode a pipeline is built and profiled, the mode is planned for what is found,
and steps run in a row under that plan. Predicted is the simulated time of a step
among many with the profile's costs: passes, messages, optimizer, sum over the stages.
Runs of all modes take turns, so that a slow spell of the machine hits all of them.
"""

import json
import os
import random
import statistics
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from parts.options import read_options
from parts.runs import in_processes
from parts.table import Table
from parts.turns import spread_of, take_turns
from torch import Tensor, nn

from zbpp import diagnostics
from zbpp.core import (
    Costs,
    PassKind,
    Schedule,
    parse_schedule,
    schedule_text,
)
from zbpp.emulation.run import emulated_batch, emulated_pipeline, steps_in_a_row
from zbpp.models import layers_from
from zbpp.pipeline import Pipeline
from zbpp.planning import plan
from zbpp.runtime.policies import StepPolicy
from zbpp.simulator import steady_step_time

MODES = ("1F1B", "ZBH1", "ZBH2", "ZBV", "VHalf")


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """Stages that sleep: uneven ones, with messages, optimizers and a slow sum."""

    stages: int = 4
    job_ms: float = 20.0
    """Mean time of a pass; those of the chunks differ by up to 30 %."""
    runs: int = 3
    repeats: int = 1
    """Profiles and plans in one run; medians of them count."""
    steps: int = 6
    rounds: int = 8
    post_validation: bool = False
    modes: tuple[str, ...] = MODES


@dataclass(frozen=True, kw_only=True)
class Real:
    """Two processes that compute: blocks of two linears."""

    stages: int = 2
    width: int = 512
    samples: int = 128
    """In a micro-batch."""
    layers: int = 8
    runs: int = 3
    repeats: int = 5
    """Profiles and plans in one run; medians of them count."""
    steps: int = 8
    rounds: int = 10
    post_validation: bool = False
    modes: tuple[str, ...] = MODES


def costs_of(options: Emulated, schedule: Schedule) -> Costs:
    """Uneven costs of the chunks, the same in every run."""
    draw = random.Random(7)
    n = schedule.placement.n_chunks

    def times() -> tuple[float, ...]:
        return tuple(options.job_ms * draw.uniform(0.7, 1.3) for _ in range(n))

    return Costs(
        times(), times(), times(), comm=options.job_ms / 20,
        optimizer=options.job_ms, reduction=options.job_ms / 5,
    )  # fmt: skip


class Block(nn.Module):
    """Norm, two Linears, a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Hand on as many numbers as come in."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def build(width: int, layers: range) -> list[nn.Module]:
    """Layers by index; the last two are heavier by a head."""
    blocks = []
    for index in layers:
        torch.manual_seed(index)
        blocks.append(Block(width))
    return blocks


def prepare(options: Emulated | Real, mode: str) -> tuple[Pipeline, Tensor]:
    """Make a pipeline of a mode, and its batch."""
    m = 2 * options.stages
    schedule = plan(mode, n_stages=options.stages, n_microbatches=m)
    if isinstance(options, Emulated):
        pipeline = emulated_pipeline(
            schedule, costs_of(options, schedule),
            post_validation=options.post_validation,
        )  # fmt: skip
        return pipeline, emulated_batch(pipeline)
    torch.manual_seed(0)
    pipeline = Pipeline(
        layers_from(partial(build, options.width), n_layers=options.layers),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda ps: torch.optim.AdamW(ps, fused=True),
        schedule=schedule,
        device="cpu",
        step=StepPolicy(post_validation=options.post_validation),
    )
    return pipeline, torch.randn(m * options.samples, options.width)


def work(options: Emulated | Real, mode: str, file: str) -> None:
    """One process's share of one run."""
    pipeline, batch = prepare(options, mode)
    turns = [_turn(options, mode, pipeline, batch) for _ in range(options.repeats)]
    found = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    if pipeline.rank == 0:
        Path(file).write_text(json.dumps(found))
    pipeline.close()


def _turn(
    options: Emulated | Real, mode: str, pipeline: Pipeline, batch: Tensor
) -> dict[str, float]:
    """Profile, plan, switch to the plan, and run."""
    profile = pipeline.profile(batch, batch, rounds=options.rounds)
    costs = profile.costs()
    text = None
    if pipeline.rank == 0:
        planned = plan(
            mode,
            n_stages=options.stages,
            n_microbatches=pipeline.n_microbatches,
            costs=costs,
        )
        text = schedule_text(planned)
    pipeline.switch(parse_schedule(pipeline.gather(text)[0]))
    step_ms, bubble = steps_in_a_row(pipeline, options.steps, batch)
    found = {
        "step_ms": step_ms,
        "predicted_ms": steady_step_time(pipeline.schedule, costs),
        "bubble": bubble,
        "load": os.getloadavg()[0],
    }
    if not pipeline.schedule.runs(PassKind.BW):
        window = diagnostics.measured_costs(pipeline, options.steps)
        found["window_ms"] = steady_step_time(pipeline.schedule, window)
    if isinstance(options, Emulated):
        nominal = costs_of(options, pipeline.schedule)
        found["nominal_ms"] = steady_step_time(pipeline.schedule, nominal)
    return found


def main() -> None:
    """Run all modes in turn and print a table."""
    options = read_options(Emulated, Real)
    run = in_processes(work, options, options.stages)
    found = take_turns(options.modes, options.runs, run)
    table = Table(
        f"{type(options).__name__} {asdict(options)}",
        ("mode", "predicted ms", "measured ms", "measured / predicted",
         "/ window's costs", "/ nominal", "load"),
    )  # fmt: skip
    for mode, runs in found.items():
        ratios = [run["step_ms"] / run["predicted_ms"] for run in runs]
        window = [run["step_ms"] / run["window_ms"] for run in runs
                  if "window_ms" in run]  # fmt: skip
        nominal = [run["step_ms"] / run["nominal_ms"] for run in runs
                   if "nominal_ms" in run]  # fmt: skip
        table.add(
            mode,
            f"{statistics.median(run['predicted_ms'] for run in runs):.1f}",
            f"{statistics.median(run['step_ms'] for run in runs):.1f}",
            spread_of(ratios),
            spread_of(window) if window else "-",
            f"{statistics.median(nominal):.3f}" if nominal else "-",
            f"{statistics.median(run['load'] for run in runs):.1f}",
        )
    table.show()


if __name__ == "__main__":
    main()
