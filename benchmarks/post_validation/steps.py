"""Cost of rollbacks to the steps of a pipeline: passes that sleep, real optimizers.

    python benchmarks/post_validation/steps.py --rounds 12

    barrier      every step waits for the norm of all gradients
    free         speculative steps that cannot be rolled back: the least possible
    deferred     with a copy of the parameters, and a second step
    snapshot     with a copy of the optimizer state

Two stages, a process each. F, B and W sleep for ``--job_ms`` each, so that they are no
source of noise; fused AdamW steps ``--parameters`` numbers on each stage with gradients
that are there, and every copy is made. No step is wrong. The ways take turns, each with
a model of its own, in blocks of steps of which the first two do not count. Costs are in
plain optimizer steps: the time that a step takes more than a free one, over the time of
`optimizer.step()`.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))

from parts.options import read_options
from parts.runs import in_processes
from parts.table import Table
from parts.turns import take_turns

import zbpp
from zbpp.emulation.layers import EmulatedLayer
from zbpp.planning import plan
from zbpp.planning.pipelines import choose_validation
from zbpp.runtime.comm.transport import Transport
from zbpp.runtime.optim.rollback import Rollback
from zbpp.runtime.optim.stage_optimizer import StageOptimizer

WAYS = ("barrier", "free", "deferred", "snapshot")


@dataclass(frozen=True)
class Steps:
    """Options of the measurement."""

    modes: tuple[str, ...] = ("ZBH1", "ZBH2", "ZBV")
    job_ms: float = 15.0
    parameters: int = 10_000_000
    microbatches: int = 4
    ways: tuple[str, ...] = WAYS
    rounds: int = 12
    steps: int = 10
    """Of a block."""


class Unknown(torch.optim.AdamW):
    """A class that zbpp does not know, so that it copies the whole state."""


class Free:
    """A speculative step that is never rolled back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.take = optimizer.step

    def commit(self) -> None:
        """Nothing."""

    def undo(self) -> None:
        """Cannot be."""
        raise AssertionError

    def forget(self) -> None:
        """Nothing."""


class Layer(nn.Module):
    """A chunk that sleeps, and holds parameters that it does not use."""

    def __init__(self, job_s: float, parameters: int) -> None:
        super().__init__()
        self.passes = EmulatedLayer(job_s, job_s, job_s)
        self.held = nn.ParameterList(torch.randn(parameters // 20) for _ in range(20))

    def forward(self, x: Tensor) -> Tensor:
        """Hand on ``x``."""
        return self.passes(x)


def make(options: Steps, mode: str, way: str) -> zbpp.Pipeline:
    """A pipeline of its own for each way."""
    torch.manual_seed(0)
    schedule = plan(mode, n_stages=2, n_microbatches=options.microbatches)
    schedule = choose_validation(schedule, way != "barrier", steps=True)
    chunks = schedule.placement.n_chunks
    layers = [
        Layer(options.job_ms / 1e3 * 2 / chunks, options.parameters * 2 // chunks)
        for _ in range(chunks)
    ]
    pipeline = zbpp.Pipeline(
        layers,
        loss_fn=lambda y, _: y.sum(),
        optimizer=lambda p: (Unknown if way == "snapshot" else torch.optim.AdamW)(
            p, lr=1e-4, fused=True
        ),
        schedule=schedule,
        clip_grad_norm=1e9,
        step=zbpp.StepPolicy(post_validation=way != "barrier"),
    )
    for executor in pipeline.stages.executors.values():
        give_gradients(executor.optimizer)
        if way == "free":
            use_free(executor.optimizer)
    return pipeline


def give_gradients(share: StageOptimizer) -> None:
    """All parameters get the same gradients in every step."""
    parameters = share.optimizers.parameters()
    gradients = [torch.randn_like(p) for p in parameters]
    reduce = share.reduce

    def given(transport: Transport) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        reduce(transport)

    share.reduce = given  # type: ignore[method-assign]


def use_free(share: StageOptimizer) -> None:
    """Let the speculative steps be plain ones."""
    (optimizer,) = share.optimizers.all
    free: Rollback = Free(optimizer)
    share.optimizers._rollback = lambda place: free  # type: ignore[method-assign]


def worker(options: Steps, mode: str, out: str) -> None:
    """One stage; rank 0 writes the seconds of a step by way, and of the optimizer."""
    torch.set_num_threads(1)
    pipelines = {way: make(options, mode, way) for way in options.ways}
    batch = torch.randn(options.microbatches, 1)
    found: dict[str, list[float]] = {way: [] for way in (*options.ways, "optimizer")}
    for _ in range(options.rounds + 1):
        for way, pipeline in pipelines.items():
            dist.barrier()
            for step in range(options.steps):
                if step == 2:
                    start = time.perf_counter()
                pipeline.step(batch, batch)
            found[way].append((time.perf_counter() - start) / (options.steps - 2))
            pipeline.synchronize()
        optimizer = pipelines["barrier"].optimizers[0]
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        start = time.perf_counter()
        optimizer.step()
        found["optimizer"].append(time.perf_counter() - start)
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({k: v[1:] for k, v in found.items()}))


def main() -> None:
    """Measure all modes and print a table."""
    options = read_options(Steps)
    run = in_processes(worker, options, 2)
    table = Table(
        f"{options.rounds} blocks of {options.steps - 2} steps",
        ("mode", "way", "step ms", "over barrier", "cost over free", "optimizer ms"),
    )
    for mode, runs in take_turns(options.modes, 1, run).items():
        found = runs[0]
        step = statistics.median(found["optimizer"])
        for way in options.ways:
            pairs = list(zip(found[way], found["barrier"], found["free"], strict=True))
            low, cost, high = statistics.quantiles(
                ((own - free) / step for own, _, free in pairs), n=4
            )
            table.add(
                mode,
                way,
                f"{1e3 * statistics.median(found[way]):.1f}",
                f"{statistics.median(own / barrier for own, barrier, _ in pairs):.3f}",
                f"{cost:+.2f} ({low:+.2f} to {high:+.2f})",
                f"{1e3 * step:.1f}",
            )
    table.show()


if __name__ == "__main__":
    main()
