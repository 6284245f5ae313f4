"""Our runtime beside a bare loop over the same program, on stages that sleep.

    python benchmarks/bare_loop.py --stages 4 --microbatches 8 --runs 5

    ours      Pipeline.step on layers that sleep beside all that a pass does by itself
    bare      for each instruction: post a receive, wait for it and sleep, or send
    autograd  the bare loop whose passes sleep within torch's autograd: F makes a graph
              of one node, B walks it, W adds one number

All are given the same program, stand in the same processes, and take turns; steps come
in a row. Every process has one thread, and a core if there are enough. Measured over
simulated counts the host time of each: what ours has above the bare loop is its own,
but for what `autograd` has above it too, which no runtime on torch can save. Messages
are a float64 of each sample; sums are all-reduces.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parts.options import read_options
from parts.runs import in_processes
from parts.table import Table
from parts.turns import spread_of, take_turns
from torch import Tensor, nn

import zbpp
from zbpp.core import Check, Costs, Pass, PassKind, Receive, Reduce, Send, Step, What
from zbpp.core import input_of as read_by
from zbpp.core import output_of as written_by
from zbpp.emulation.layers import EmulatedLayer, sleep_until
from zbpp.planning import plan
from zbpp.planning.pipelines import choose_validation
from zbpp.schedules import lower
from zbpp.simulator import steady_step_time

SETTLING = 3


@dataclass(frozen=True)
class Options:
    """Options of the measurement."""

    stages: int = 4
    microbatches: int = 8
    job_ms: float = 20.0
    runs: int = 5
    """Turns of every mode, each in processes of its own."""
    rounds: int = 3
    """Turns of ours and the bare loop in one run."""
    steps: int = 4
    """Counted in each round, after three that are not."""
    modes: tuple[str, ...] = ("1F1B", "ZBH1", "ZBH2", "ZBV")
    post_validation: bool = False


class Sleeping(torch.autograd.Function):
    """The identity, which sleeps in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        """Sleep."""
        ctx.seconds = seconds
        y = x.clone()
        sleep_until(time.perf_counter() + seconds)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        """Sleep; the weight's gradient is left to W."""
        dx = dy.clone()
        sleep_until(time.perf_counter() + ctx.seconds)
        return dx, None, None


class Autograd:
    """The passes of a bare loop that has torch keep graphs.

    Args:
        seconds: that half a backward takes, and a forward.
        last: the chunk whose outputs are the losses.
    """

    def __init__(self, seconds: float, last: int) -> None:
        self.seconds, self.last = seconds, last
        self.weight = nn.Parameter(torch.zeros(()))
        self.weight.grad = torch.zeros(())
        self.graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def run(self, job: Pass, read: Tensor | None) -> Tensor:
        """Run a pass; returns what it sends."""
        place = job.chunk, job.microbatch
        if job.kind is PassKind.F:
            x = torch.zeros(1, 1, dtype=torch.float64) if read is None else read
            x = x.detach().requires_grad_()
            y: Tensor = Sleeping.apply(x, self.weight, self.seconds)
            self.graphs[place] = x, y
            return y.detach()
        dx = torch.zeros(())
        if job.kind is not PassKind.W:
            x, y = self.graphs.pop(place)
            dy = torch.ones_like(y) if job.chunk == self.last else read
            (dx,) = torch.autograd.grad(y, x, dy)
        if job.kind is not PassKind.B:
            sleep_until(time.perf_counter() + self.seconds)
            self.weight.grad.add_(torch.zeros(()))
        return dx


def bare(
    program: Any,
    rank: int,
    seconds: float,
    n_chunks: int,
    autograd: Autograd | None = None,
) -> Callable[[], None]:
    """Make a step of the loop, which knows nothing but the program."""
    kinds = {What.ACTIVATION: 0, What.GRADIENT: 1}
    sums: list[tuple[Any, Tensor]] = []

    def tag(value: Any) -> int:
        return (value.microbatch * n_chunks + value.chunk) * 2 + kinds[value.what]

    def step() -> None:
        posted: dict[Any, Any] = {}
        made: dict[Any, Tensor] = {}
        sent = []
        for one in program:
            if isinstance(one, Receive):
                buffer = torch.empty(1, 1, dtype=torch.float64)
                work = dist.irecv(buffer, one.peer, tag=tag(one.value))
                posted[one.value] = work, buffer
            elif isinstance(one, Send):
                payload = made.pop(one.value, None)
                if payload is None:
                    payload = torch.zeros(1, 1, dtype=torch.float64)
                work = dist.isend(payload, one.peer, tag=tag(one.value))
                sent.append((work, payload))
            elif isinstance(one, Pass):
                value = read_by(one, n_chunks)
                read = made.pop(value, None)
                if value in posted:
                    work, read = posted.pop(value)
                    work.wait()
                if autograd is not None:
                    wrote = written_by(one, n_chunks)
                    found = autograd.run(one, read)
                    if wrote is not None:
                        made[wrote] = found
                    continue
                both = 2 if one.kind is PassKind.BW else 1
                sleep_until(time.perf_counter() + both * seconds)
            elif isinstance(one, Reduce):
                vector = torch.zeros(1)
                sums.append((dist.all_reduce(vector, async_op=True), vector))
            elif isinstance(one, Check) or (isinstance(one, Step) and not checks):
                while sums:
                    sums.pop()[0].wait()
        for work, _ in sent:
            work.wait()

    checks = any(isinstance(one, Check) for one in program)
    return step


def measure(options: Options, mode: str, file: str) -> None:
    """Run both in turns; every rank calls."""
    cores = sorted(os.sched_getaffinity(0))
    schedule = plan(mode, n_stages=options.stages, n_microbatches=options.microbatches)
    schedule = choose_validation(schedule, options.post_validation)
    n_chunks = schedule.placement.n_chunks
    seconds = options.job_ms / 1e3
    pipeline = zbpp.Pipeline(
        [EmulatedLayer(*(3 * (seconds,)), adds=True) for _ in range(n_chunks)],
        schedule,
        loss_fn=lambda outputs, targets: outputs.mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        device="cpu",
        step=zbpp.StepPolicy(post_validation=options.post_validation),
        execution=zbpp.Execution(watch=False),
    )
    if len(cores) >= options.stages:
        os.sched_setaffinity(0, {cores[pipeline.rank]})
    batch = torch.zeros(options.microbatches, 1, dtype=torch.float64)
    program = lower(pipeline.schedule)[pipeline.rank]
    graphs = Autograd(seconds, n_chunks - 1)
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: pipeline.step(batch, batch),
        "bare": bare(program, pipeline.rank, seconds, n_chunks),
        "autograd": bare(program, pipeline.rank, seconds, n_chunks, graphs),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, step in ways.items():
            ends = []
            for _ in range(SETTLING + options.steps):
                step()
                ends.append(time.perf_counter())
            pipeline.synchronize()
            last = [max(one) for one in zip(*pipeline.gather(ends), strict=True)]
            found[way].append((last[-1] - last[SETTLING - 1]) / options.steps)
    per_stage = options.job_ms * n_chunks / options.stages
    costs = Costs(f=per_stage, b=per_stage, w=per_stage)
    simulated = steady_step_time(pipeline.schedule, costs)
    if pipeline.rank == 0:
        ratios = {
            way: 1e3 * statistics.median(steps) / simulated
            for way, steps in found.items()
        }
        Path(file).write_text(json.dumps({"simulated_ms": simulated, **ratios}))
    pipeline.close()


def main() -> None:
    """Measure all modes and print a table."""
    options = read_options(Options)
    run = in_processes(measure, options, options.stages)
    found = take_turns(options.modes, options.runs, run)
    how = "post-validated" if options.post_validation else "behind a barrier"
    table = Table(
        f"p={options.stages} m={options.microbatches}, jobs of {options.job_ms:g} ms, "
        f"{how}, load {os.getloadavg()[0]:.1f}",
        ("mode", "simulated ms", "ours / simulated", "bare / simulated",
         "ours above bare", "autograd above bare"),
    )  # fmt: skip
    more = ("ours", "autograd")
    for mode, runs in found.items():
        table.add(
            mode,
            f"{runs[0]['simulated_ms']:.0f}",
            *(spread_of([run[way] for run in runs]) for way in ("ours", "bare")),
            *(spread_of([r[way] - r["bare"] for r in runs]) for way in more),
        )
    table.show()


if __name__ == "__main__":
    main()
