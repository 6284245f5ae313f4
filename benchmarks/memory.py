"""Peak memory of a step: estimated, measured, and that of torch's same mode.

    python benchmarks/memory.py
    python benchmarks/memory.py --seq 256 zbpp:1F1B torch:1F1B

Every contender runs in separate processes, with the model, batch, split and optimizer
of `zbpp bench`, behind the optimizer's barrier. Measured is the largest memory of
tensors in the third step, by the allocator's events, which a profiler records.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parts import end_worker, show, torchrun
from torch.profiler import ProfilerActivity, profile, record_function

import zbpp
from zbpp.bench.request import BenchOptions, BenchPlan
from zbpp.bench.setting import Setting, seeded_model, step_batch
from zbpp.bench.torchs import TorchSchedule
from zbpp.memory import estimate
from zbpp.training.llama import Config, build_layers, cross_entropy
from zbpp.training.setup import make_optimizer

CONTENDERS = (
    "zbpp:1F1B",
    "torch:1F1B",
    "zbpp:ZBH1",
    "torch:InterleavedZeroBubble",
    "zbpp:ZBV",
    "torch:ZBVZeroBubble",
)
STAGES, MICROBATCHES, STEPS = 2, 8, 3


def four_blocks() -> Any:
    """Four blocks of width 512 with embedding and head; one sample."""
    seq = int(os.environ["SEQ"])
    config = Config(seq, seed=0, dim=512, n_blocks=4, n_heads=8, hidden=2048)
    tokens = torch.randint(256, (1, seq + 1))
    builder = partial(build_layers, config), config.n_blocks + 2
    return builder, (tokens[:, :-1], tokens[:, 1:]), cross_entropy


OPTIONS = BenchOptions(
    out=Path(), model="memory:four_blocks", microbatches=MICROBATCHES
)


def build(contender: str) -> Any:
    """A function that takes a step of a contender."""
    whose, _, mode = contender.partition(":")
    loaded = seeded_model(OPTIONS)
    batch = step_batch(loaded, MICROBATCHES)
    if whose == "torch":
        plan = BenchPlan(STAGES, "", None, {})
        setting = Setting(OPTIONS, plan, torch.device("cpu"), batch)
        return TorchSchedule(setting, contender).step
    pipeline = zbpp.Pipeline(
        loaded.layered,
        mode,
        n_microbatches=MICROBATCHES,
        loss_fn=loaded.loss_fn,
        optimizer=partial(make_optimizer, 1e-5),
        device="cpu",
        step=zbpp.StepPolicy(post_validation=False),
    )
    return lambda: pipeline.step(batch.inputs, batch.targets)


def measured(contender: str) -> int:
    """Bytes of this process at the peak of its last step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step = build(contender)
        for number in range(STEPS):
            with record_function(f"step {number}"):
                step()
    events: Any = run.profiler
    events = sorted(events.kineto_results.events(), key=lambda event: event.start_ns())
    last = next(event for event in events if event.name() == f"step {STEPS - 1}")
    begin, end = last.start_ns(), last.start_ns() + last.duration_ns()
    memory = most = 0
    for event in events:
        if event.name() == "[memory]":
            memory += event.nbytes()
            if begin <= event.start_ns() <= end:
                most = max(most, memory)
    return most


def estimated(contender: str) -> list[int] | None:
    """Peaks of the stages by `zbpp.memory.estimate`; None: they are torch's."""
    whose, _, mode = contender.partition(":")
    if whose == "torch":
        return None
    loaded = seeded_model(OPTIONS)
    found = estimate(
        loaded.layered, (loaded.inputs, loaded.targets), loaded.loss_fn,
        n_stages=STAGES, n_microbatches=MICROBATCHES,
        modes=[mode], optimizer=partial(make_optimizer, 1e-5), post_validation=False,
    ).as_json()  # fmt: skip
    return [stage["peak"] for stage in found["modes"][mode]]


def main() -> None:
    """Print a row for each contender; or be one process of a run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("contenders", nargs="*", default=CONTENDERS)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["SEQ"] = str(args.seq)
    if args.worker is not None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        peaks: list[Any] = [None] * STAGES
        dist.all_gather_object(peaks, measured(args.worker))
        end_worker({"peaks": peaks}, args.out)
    rows = []
    for name in args.contenders:
        words = ("--seq", args.seq, "--worker", name)
        real = torchrun(__file__, STAGES, *words)["peaks"]
        guess = estimated(name)
        cells = [", ".join(f"{one / 2**20:.1f}" for one in real), None, None]
        if guess is not None:
            errors = (a / b - 1 for a, b in zip(guess, real, strict=True))
            cells[1] = ", ".join(f"{one / 2**20:.1f}" for one in guess)
            cells[2] = ", ".join(f"{one:+.1%}" for one in errors)
        rows.append((name, *cells))
    columns = ("contender", "measured, MiB", "estimated, MiB", "error")
    show(f"Peaks of {STAGES} stages, sequence {args.seq}", columns, rows)


if __name__ == "__main__":
    main()
