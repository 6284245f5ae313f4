"""Host time a job, ours against torch.distributed.pipelining's same mode.

    python benchmarks/host_time.py pipelines          # two gloo processes, tiny tensors
    python benchmarks/host_time.py calls              # Python calls a job: load-free

A job is an F, B, W or BW of one chunk: a Linear of width 8, so that nearly all of its
time is the runtime's. Counted is the CPU time of the thread that steps, as waits are
the schedule's; the rest of a step is spread over its jobs. Both pipelines stand in one
process group and take turns; a figure is a ratio to the neighbour of its turn.
"""

import argparse
import cProfile
import os
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parts import end_worker, quartiles, show, torchrun
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.functional import mse_loss

import zbpp

WIDTH, ROWS = 8, 4
P = 2
STEPS = 5
"""Of a turn."""
MODES = {
    "1F1B": ("Schedule1F1B", 1),
    "ZBH1": ("ScheduleInterleavedZeroBubble", 1),
    "VPP": ("ScheduleInterleaved1F1B", 2),
    "ZBV": ("ScheduleZBVZeroBubble", 2),
}
"""Torch's name of each mode, and the chunks of a stage."""


def layers(mode: str) -> list[nn.Module]:
    """One Linear for each chunk, the same in every process."""
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(P * MODES[mode][1])]


def ours(mode: str, m: int, batch: tuple[Any, Any]) -> Any:
    """Return a step of zbpp, and the pipeline."""
    options = {"schedule": mode, "n_microbatches": m}
    pipeline = zbpp.Pipeline(layers(mode), loss_fn=mse_loss, optimizer=None, **options)
    return (lambda: pipeline.step(*batch)), pipeline


def torchs(mode: str, m: int, batch: tuple[Any, Any]) -> tuple[Any, list[nn.Module]]:
    """Return a step of torch's pipeline, and this process's modules."""
    name, n_local = MODES[mode]
    rank, n_chunks = dist.get_rank(), P * n_local
    own = [rank, n_chunks - 1 - rank] if mode == "ZBV" else range(rank, n_chunks, P)
    built, device = layers(mode), torch.device("cpu")
    stages = [PipelineStage(built[i], i, n_chunks, device) for i in own]
    make = getattr(schedules, name)
    first = stages[0] if name == "Schedule1F1B" else stages
    schedule = make(first, n_microbatches=m, loss_fn=mse_loss)
    args = (batch[0],) if 0 in own else ()
    target = {"target": batch[1]} if n_chunks - 1 in own else {}
    return (lambda: schedule.step(*args, **target)), [built[i] for i in own]


def prepare(mode: str, m: int) -> dict[str, Callable[[], object]]:
    """Both pipelines, warm, and with equal gradients of one step."""
    torch.manual_seed(1)
    batch = torch.randn(ROWS * m, WIDTH), torch.randn(ROWS * m, WIDTH)
    our_step, pipeline = ours(mode, m, batch)
    their_step, modules = torchs(mode, m, batch)
    our_step()
    their_step()
    theirs = [p.grad for module in modules for p in module.parameters()]
    for (_, p), gradient in zip(pipeline.named_parameters(), theirs, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    steps = {"ours": our_step, "torch": their_step}
    for step in (*steps.values(), *steps.values()):
        step()
    return steps


def cpu_us(step: Callable[[], object], n_jobs: int) -> float:
    """CPU time of this thread a job, in us; the first step of a turn does not count."""
    step()
    began = time.thread_time()
    for _ in range(STEPS):
        step()
    return (time.thread_time() - began) / (n_jobs * STEPS) * 1e6


def calls(step: Callable[[], object], n_jobs: int) -> float:
    """Calls of Python and C functions a job."""
    profile = cProfile.Profile()
    profile.runcall(step)
    return float(pstats.Stats(profile).total_calls / n_jobs)  # type: ignore[attr-defined]


def work(args: argparse.Namespace) -> None:
    """One of two processes: measure, and write what rank 0 has found."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    steps = prepare(args.mode, args.microbatches)
    n_kinds = 2 + ("ZB" in args.mode)
    n_jobs = n_kinds * args.microbatches * MODES[args.mode][1]
    look = cpu_us if args.what == "pipelines" else calls
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.rounds):
        for name in sorted(steps, reverse=turn % 2 == 1):
            dist.barrier()
            found[name].append(look(steps[name], n_jobs))
    every: list[Any] = [None] * P
    dist.all_gather_object(every, found)
    end_worker({"processes": every}, Path(args.out))


def pipelines(args: argparse.Namespace) -> None:
    """Print host time (or calls) a job, by mode."""
    rows = []
    for mode in args.modes:
        words = [args.what, "--mode", mode, "--rounds", args.rounds]
        words += ["--microbatches", args.microbatches]
        every = torchrun(__file__, P, *words)["processes"]
        both = {name: zip(*(x[name] for x in every), strict=True) for name in every[0]}
        means = {name: list(map(statistics.mean, rows)) for name, rows in both.items()}
        ratios = [a / b for a, b in zip(*means.values(), strict=True)]
        rows.append((mode, *map(statistics.median, means.values()), quartiles(ratios)))
    unit = "us of CPU" if args.what == "pipelines" else "calls"
    show(f"{unit} a job", ("mode", "ours", "torch", "ours / torch"), rows)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("pipelines", "calls"))
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode is not None:
        work(args)
    else:
        pipelines(args)


if __name__ == "__main__":
    main()
