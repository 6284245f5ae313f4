"""Pipelines of 2 and 4 stages on one GPU: mode against mode, measured and simulated.

spinning    kernels that occupy one multiprocessor for a given time, so that stages on
            streams of their own run side by side, as on GPUs of their own
computing   blocks of a transformer, whose stages share all that the GPU has: no mode
            can be faster than the work, as a plain loop does it
"""

import statistics
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from gpu.clock import finish, spin
from gpu.sizes import Sizes
from parts.split_models import Block
from parts.table import Table
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zbpp
from zbpp import diagnostics
from zbpp.core import Costs, PassKind, Schedule
from zbpp.planning import plan
from zbpp.runtime.backward.queue import current_queue
from zbpp.simulator import bubble_rate, steady_step_time

__all__ = ["SpinningLayer", "measure"]

MODES = ("1F1B", "ZBH1", "ZBH2", "ZBV")


class _Spin(torch.autograd.Function):
    """The identity; its forward and its two half backwards spin."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, job_s: float) -> Tensor:
        ctx.weight, ctx.job_s, ctx.queue = weight, job_s, current_queue()
        spin(x.device, job_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        weight, job_s, queue = ctx.weight, ctx.job_s, ctx.queue
        spin(dy.device, job_s)
        if queue is None:
            return dy.clone(), _slow_zero(weight, job_s), None
        queue.defer((weight,), lambda: (_slow_zero(weight, job_s),))
        return dy.clone(), None, None


def _slow_zero(weight: Tensor, job_s: float) -> Tensor:
    spin(weight.device, job_s)
    return torch.zeros_like(weight)


class SpinningLayer(nn.Module):
    """Occupies its stream for as long in F, in B and in W; hands on its input."""

    def __init__(self, job_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.job_s = job_s

    def forward(self, x: Tensor) -> Tensor:
        """Any shape to the same."""
        y: Tensor = _Spin.apply(x, self.weight, self.job_s)  # type: ignore[no-untyped-call]
        return y


def measure(sizes: Sizes) -> list[Table]:
    """Step times by mode and number of stages."""
    stages = (2,) if sizes.is_tiny else (2, 4)
    return [
        Table(
            "Stages that spin",
            note="One job takes the same in F, B and W; each stage on a stream of its "
            "own. A step lasts from the last end of one to that of the next, by "
            "events; simulated with the jobs' times, and an optimizer that takes none.",
            columns=[
                "stages",
                "mode",
                "job, ms",
                "step, ms",
                "simulated, ms",
                "measured / simulated",
                "bubble measured",
                "bubble simulated",
            ],
            rows=[row for p in stages for row in _spinning(p, sizes)],
        ),
        Table(
            "Stages that compute",
            note="Blocks of a transformer with AdamW, bf16 autocast on a GPU; all "
            "stages share it. Over the plain loop: what stages and messages cost here.",
            columns=["stages", "mode", "step, ms", "lower quartile", "upper", "/ loop"],
            rows=[row for p in stages for row in _computing(p, sizes)],
        ),
    ]


def _spinning(p: int, sizes: Sizes) -> list[list[Any]]:
    job_s, m, n = (1e-3, 4, 3) if sizes.is_tiny else (2e-3, 4 * p, 12)
    rows = []
    for mode in _modes(sizes):
        schedule = plan(mode, n_stages=p, n_microbatches=m)
        n_chunks = schedule.placement.n_chunks
        layers = [SpinningLayer(job_s) for _ in range(n_chunks)]
        pipeline = _pipeline(layers, schedule, sizes, torch.optim.SGD)
        x = torch.ones(m, 1, device=sizes.device)
        with warnings.catch_warnings():
            # what a Function defers by itself is in no report of the split
            warnings.filterwarnings("ignore", message=".*gains little here")
            for _ in range(n):
                pipeline.step(x, x)
        timelines = diagnostics.timelines(pipeline, n)
        ends = [max(slot.end for row in t.rows for slot in row) for t in timelines]
        times = [after - before for before, after in pairwise(ends)]
        per_stage = 1e3 * job_s * n_chunks / p
        costs = Costs(f=per_stage, b=per_stage, w=per_stage)
        simulated = steady_step_time(pipeline.schedule, costs)
        step = 1e3 * statistics.median(times)
        measured = statistics.median(map(bubble_rate, timelines))
        ideal = 1 - 3 * per_stage * m / simulated
        rows.append(
            [p, mode, 1e3 * job_s, step, simulated, step / simulated, measured, ideal]
        )
        pipeline.close()
    return rows


def _computing(p: int, sizes: Sizes) -> list[list[Any]]:
    width, seq, m, n = (16, 8, 4, 2) if sizes.is_tiny else (1024, 1024, 16, 8)
    heads = 2 if sizes.is_tiny else 16
    x = torch.randn(m, seq, width, device=sizes.device)

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Block(width, heads).to(sizes.device) for _ in range(8)]

    contenders: dict[str, Callable[[], object]] = {
        "plain loop": _plain(layers(), x, m, sizes)
    }
    pipelines = []
    for mode in _modes(sizes):
        schedule = plan(mode, n_stages=p, n_microbatches=m)
        for graphs in (False, True):
            one = _pipeline(layers(), schedule, sizes, _adamw, graphs=graphs)
            pipelines.append(one)
            name = f"{mode}, CUDA graphs" if graphs else mode
            contenders[name] = lambda pipe=one: pipe.step(x, x)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(2):
        for name, step in contenders.items():
            times[name] += _steps(step, n, sizes)
    for pipeline in pipelines:
        pipeline.close()
    base = statistics.median(times["plain loop"])
    rows = []
    for name, own in times.items():
        low, middle, high = statistics.quantiles(own, n=4, method="inclusive")
        rows.append([p, name, 1e3 * middle, 1e3 * low, 1e3 * high, middle / base])
    return rows


def _modes(sizes: Sizes) -> tuple[str, ...]:
    return MODES[::3] if sizes.is_tiny else MODES


def _steps(step: Callable[[], object], n: int, sizes: Sizes) -> list[float]:
    """Seconds a step, of three in a row without a wait between them."""
    for _ in range(3):  # graphs are recorded in the third step
        step()
    found = []
    for _ in range(n):
        finish(sizes.device)
        began = time.perf_counter()
        for _ in range(3):
            step()
        finish(sizes.device)
        found.append((time.perf_counter() - began) / 3)
    return found


def _pipeline(
    layers: list[nn.Module],
    schedule: Schedule,
    sizes: Sizes,
    optimizer: Any,
    *,
    graphs: bool = False,
) -> zbpp.Pipeline:
    on_gpu = sizes.device.type == "cuda"
    return zbpp.Pipeline(
        layers,
        loss_fn=mse_loss,
        optimizer=optimizer,
        schedule=schedule,
        device=sizes.device,
        numerics=zbpp.Numerics(
            autocast=torch.bfloat16 if on_gpu and optimizer is _adamw else None
        ),
        step=zbpp.StepPolicy(post_validation=schedule.runs(PassKind.W) or None),
        execution=zbpp.Execution(watch=False, stage_streams=True, cuda_graphs=graphs),
    )


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _plain(
    layers: list[nn.Module], x: Tensor, m: int, sizes: Sizes
) -> Callable[[], object]:
    model = nn.Sequential(*layers)
    optimizer = _adamw(model.parameters())
    kind = sizes.device.type

    def step() -> None:
        for part in x.chunk(m):
            with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                loss = mse_loss(model(part), part)
            (loss / m).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
