"""Passes that stop at their points beside the same ones in a row, on layers that sleep.

    python benchmarks/overlap.py --stages 2 --microbatches 16 --job_ms 40 --rounds 5
    python benchmarks/overlap.py --pipeline_schedule_mode ZBV --rounds 5

A layer sleeps for attention, dispatch, experts and combine, as a mixture of experts
does; dispatch and combine stand in `zbpp.overlap_point`. F, B and W of a chunk compute
for ``--job_ms`` each; ``--share`` of F and of B comes on top of that as communication.
DualPipeV runs pairs. Every other mode is planned for these parts of F, B and W, and the
simulated step is that of the plan. Both pipelines run in the same processes and take
turns, step after step, each from a common start. The host's own time comes on top of
all sleeps. Hidden is the share of the communication during which the same process
computes.
"""

import json
import os
import statistics
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from parts.options import read_options
from parts.runs import in_processes
from parts.table import Table
from parts.turns import spread_of
from torch import Tensor, nn

import zbpp
from zbpp.core import Lane, Parts
from zbpp.emulation.layers import sleep_until
from zbpp.runtime.backward.queue import current_queue
from zbpp.simulator import simulate, step_time

WAYS = {"in turns": True, "in a row": False}
_WARM_UP = 1


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    pipeline_schedule_mode: str = "DualPipeV"
    """Of two chunks a stage."""
    stages: int = 2
    microbatches: int = 16
    layers: int = 1
    """Of a chunk."""
    job_ms: float = 40.0
    share: float = 0.4
    rounds: int = 5

    @property
    def part_ms(self) -> float:
        """Computing of one part, of which a layer has two in F, B and W."""
        return self.job_ms / (2 * self.layers)

    @property
    def call_ms(self) -> float:
        """One communication, of which a layer has two in F and in B."""
        return self.part_ms * self.share / (1 - self.share)

    @property
    def costs(self) -> zbpp.Costs:
        """Times of a stage of two chunks, in ms, without pairs' own."""
        n = 2 * 2 * self.layers
        both = n * (self.part_ms + self.call_ms)
        return zbpp.Costs(f=both, b=both, w=n * self.part_ms, time_unit="ms")

    @property
    def parts(self) -> zbpp.Costs:
        """The same, part by part."""
        part, call = (Lane.COMPUTE, self.part_ms), (Lane.NETWORK, self.call_ms)
        f, b = (part, call, part, call), (call, part, call, part)
        return zbpp.Costs(parts=Parts(f, b, (part, part), layers=2 * self.layers))

    def plan(self) -> zbpp.Plan:
        """What both pipelines run."""
        costs = self.costs if self.pipeline_schedule_mode == "DualPipeV" else self.parts
        return zbpp.make_plan(
            zbpp.PlanRequest(
                schedule=self.pipeline_schedule_mode,
                n_stages=self.stages,
                n_microbatches=self.microbatches,
                costs=costs,
            )
        )

    def simulated(self, schedule: zbpp.Schedule) -> dict[str, float]:
        """Steps of both ways, in ms."""
        beside = self.parts
        if schedule.parts is None:
            of_pairs = (self.pair_ms,) * (2 * self.stages)
            beside = replace(self.costs, fb=of_pairs)
        ways = dict(zip(WAYS, (beside, self.costs), strict=True))
        return {way: step_time(simulate(schedule, ways[way])) for way in ways}

    @property
    def pair_ms(self) -> float:
        """A pair in turns: each communication beside one part of the other half.

        F's parts lie under B's communications, and B's under F's; its last one with W.
        """
        n = 2 * self.layers
        beside = max(self.part_ms, self.call_ms)
        return (2 * n - 1) * beside + max(self.part_ms + self.job_ms, self.call_ms)


class Lanes:
    """What one process has computed and communicated, from when to when."""

    def __init__(self) -> None:
        self.computed: list[tuple[float, float]] = []
        self.communicated: list[tuple[float, float]] = []

    def hidden_s(self) -> float:
        """Time in which both went on."""
        return sum(
            max(0.0, min(end, stop) - max(start, begin))
            for start, end in self.communicated
            for begin, stop in self.computed
        )


LANES = Lanes()


def sleep(ms: float, lane: str) -> None:
    """Take a time on a lane."""
    start = time.perf_counter()
    sleep_until(start + ms / 1e3)
    getattr(LANES, lane).append((start, time.perf_counter()))


class Part(torch.autograd.Function):
    """The identity; F, B and W take their time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ms: float) -> Tensor:
        """Compute, and keep where W's work is to go."""
        ctx.weight, ctx.ms, ctx.queue = weight, ms, current_queue()
        y = x.clone()
        sleep(ms, "computed")
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """Compute, and leave W's work."""
        weight, ms = ctx.weight, ctx.ms

        def compute_w() -> list[Tensor]:
            sleep(ms, "computed")
            return [torch.zeros_like(weight)]

        ctx.queue.defer([weight], compute_w)
        dx = dy.clone()
        sleep(ms, "computed")
        return dx, None, None


class Call(torch.autograd.Function):
    """The identity, which communicates in F and in B."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ms: float) -> Tensor:
        """Communicate."""
        ctx.ms = ms
        sleep(ms, "communicated")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Communicate."""
        sleep(ctx.ms, "communicated")
        return dy.clone(), None


class Layer(nn.Module):
    """attention | dispatch | experts | combine."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.attention = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.experts = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self._options = options

    def forward(self, x: Tensor) -> Tensor:
        """Hand on what it is given."""
        part_ms, call_ms = self._options.part_ms, self._options.call_ms
        x = zbpp.overlap_point(
            Call.apply, Part.apply(x, self.attention, part_ms), call_ms
        )
        return zbpp.overlap_point(
            Call.apply, Part.apply(x, self.experts, part_ms), call_ms
        )


def measure(options: Options, _: str, file: str) -> None:
    """Run both in turns; every rank calls."""
    warnings.filterwarnings("ignore", message=".* gains little here")
    n_layers = 2 * options.stages * options.layers
    plan = options.plan()
    pipelines = {
        way: zbpp.Pipeline(
            [Layer(options) for _ in range(n_layers)],
            plan,
            loss_fn=lambda outputs, targets: outputs.mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            device="cpu",
            step=zbpp.StepPolicy(post_validation=False),
            execution=zbpp.Execution(watch=False, overlap=overlap),
        )
        for way, overlap in WAYS.items()
    }
    batch = torch.zeros(options.microbatches, 1, dtype=torch.float64)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    hidden = []
    for turn in range(_WARM_UP + options.rounds):
        for way, pipeline in pipelines.items():
            LANES.__init__()  # type: ignore[misc]
            pipeline.gather(None)  # all ranks start together
            start = time.perf_counter()
            pipeline.step(batch, batch)
            took = max(pipeline.gather(time.perf_counter() - start))
            spent = sum(end - start for start, end in LANES.communicated)
            parts = pipeline.gather((LANES.hidden_s(), spent))
            if turn >= _WARM_UP:
                times[way].append(1e3 * took)
                if way == "in turns":
                    sums = [sum(one) for one in zip(*parts, strict=True)]
                    hidden.append(sums[0] / sums[1])
    simulated = options.simulated(plan.schedule)
    if pipelines["in turns"].rank == 0:
        figures = {"times": times, "simulated": simulated, "hidden": hidden}
        Path(file).write_text(json.dumps(figures))
    for pipeline in pipelines.values():
        pipeline.close()


def main() -> None:
    """Measure, and print a table."""
    options = read_options(Options)
    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"overlap-{os.getpid()}.json"
    in_processes(measure, options, options.stages)("", file)
    found = json.loads(file.read_text())
    file.unlink()
    table = Table(
        f"{options.pipeline_schedule_mode}, p={options.stages}, "
        f"m={options.microbatches}, jobs of {options.job_ms:g} ms, "
        f"{options.share:.0%} communication, "
        f"{options.layers} layers a chunk, {options.rounds} rounds, "
        f"load {os.getloadavg()[0]:.1f}",
        ("passes", "simulated", "measured", "measured / simulated", "hidden"),
    )
    for way, times in found["times"].items():
        simulated = found["simulated"][way]
        is_hidden = way == "in turns"
        table.add(
            way,
            f"{simulated:.0f} ms",
            f"{statistics.median(times):.0f} ms",
            spread_of([one / simulated for one in times]),
            spread_of(found["hidden"]) if is_hidden else "0",
        )
    table.show()


if __name__ == "__main__":
    main()
