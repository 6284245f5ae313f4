"""Peak memory of a step beside torch's same mode: bytes of tensors, and of the process.

python benchmarks/memory/peaks.py --seq 64
python benchmarks/memory/peaks.py --seq 64 zbpp:1F1B torch:1F1B --jobs

Every contender runs in processes of its own, with the model, batch, split and
optimizer of `zbpp bench`. Tensors are counted by the allocator's own events from the
start on, and the peak is that of the third step. With --resident it runs once more
without a profiler, for the process's resident peak in the second and third step.
"""

import argparse
import re
import sys
import tempfile
from collections import ChainMap
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import record_function

sys.path.append(str(Path(__file__).parents[1]))

from parts.memory_events import Event, Range, profiled
from parts.table import Table

import zbpp.bench.ours
from zbpp.bench.contender import Field, step_batch
from zbpp.bench.names import split_name
from zbpp.bench.peers import Peer, build_peer
from zbpp.bench.request import BenchRequest, planned
from zbpp.bench.turns import _peak, _reset_peak
from zbpp.pipeline import Pipeline
from zbpp.runtime.support.torch_internals import hooked_passes
from zbpp.training.llama import LlamaConfig

CONTENDERS = (
    "zbpp:1F1B",
    "torch:1F1B",
    "zbpp:ZBH1",
    "zbpp:ZBH1, barrier",
    "torch:InterleavedZeroBubble",
    "zbpp:ZBV",
    "zbpp:ZBV, barrier",
    "torch:ZBVZeroBubble",
)
STEPS = 3
RANGE = re.compile(r"(last )?step|[0-9]+(F|BW|B|W)[0-9]+|O|V")
CPU = torch.device("cpu")


def run(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a contender twice; figures by process."""
    found = []
    for counted in (True, False)[: 1 + options.resident]:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (folder, name, options, counted)
            mp.spawn(_process, arguments, nprocs=options.stages)
            found.append(
                [torch.load(Path(folder) / str(r)) for r in range(options.stages)]
            )
    return [dict(ChainMap(*own)) for own in zip(*found, strict=True)]


def _process(
    rank: int, folder: str, name: str, options: argparse.Namespace, counted: bool
) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", options.stages)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.stages)
    contender, _, how = name.partition(", ")
    post_validation = None if not how else False
    zbpp.bench.ours.Pipeline = partial(Pipeline, post_validation=post_validation)  # type: ignore[misc]
    found = _counted(contender, options) if counted else _resident(contender, options)
    torch.save(found, Path(folder) / str(rank))
    dist.barrier()
    dist.destroy_process_group()


def _built(contender: str, options: argparse.Namespace) -> Any:
    config = LlamaConfig(
        dim=512, n_blocks=options.n_blocks, n_heads=8, hidden=2048, seq=options.seq
    )
    request = planned(
        BenchRequest(
            contenders=(contender,),
            stages=options.stages,
            microbatches=options.microbatches,
            load=partial(config.loaded, 1),
            out=Path(),
            command="",
            effort="fast",
        )
    )
    field = Field(request, CPU, step_batch(request.load(), request.microbatches))
    if split_name(contender)[0] == "torch":
        return build_peer(field, contender, steps=True)
    schedule = request.schedules[contender]
    assert schedule is not None
    return zbpp.bench.ours.build_ours(field, schedule, steps=True)


def _hook(stage: Any, kind: str, microbatch: int, run: Any) -> Any:
    with record_function(f"{stage.stage_index}{kind}{microbatch}"):
        return run()


def _counted(contender: str, options: argparse.Namespace) -> dict[str, Any]:
    with profiled() as run:
        made = _built(contender, options)
        with hooked_passes(getattr(made, "_stages", ()), _hook):
            for step in range(STEPS):
                last = step == STEPS - 1
                with record_function(f"{'last ' * last}step"):
                    made.step()
        own = _parts(made)
        made.close()
    return own | _most(*_events(run))


def _events(run: Any) -> tuple[list[Event], list[Range]]:
    """All allocations, and the ranges of jobs and steps, in time."""
    memory, ranges = [], []
    for event in run.profiler.kineto_results.events():
        start = event.start_ns()
        if event.name() == "[memory]":
            memory.append((start, event.nbytes()))
        elif RANGE.fullmatch(event.name()):
            ranges.append((event.name(), start, start + event.duration_ns()))
    return sorted(memory), sorted(ranges, key=lambda one: one[1])


def _resident(contender: str, options: argparse.Namespace) -> dict[str, Any]:
    made = _built(contender, options)
    made.step()
    dist.barrier()
    _reset_peak(CPU)
    for _ in range(STEPS - 1):
        made.step()
    made.settle()
    found = _peak(CPU)
    made.close()
    return {"resident": found}


def _parts(made: Any) -> dict[str, Any]:
    """Bytes that are there in any case: of parameters, gradients and optimizer."""
    if isinstance(made, Peer):
        weights = [p for chunk in made._chunks.values() for p in chunk.parameters()]
        optimizers = [made._optimizer]
    else:
        weights = [p for _, p in made.pipeline.named_parameters()]
        optimizers = made.pipeline.optimizers
    state = [
        value
        for one in optimizers
        for own in one.state.values()
        for value in own.values()
        if isinstance(value, torch.Tensor)
    ]
    return {"weights": _bytes(weights), "state": _bytes(state)}


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _most(memory: list[Event], ranges: list[Range]) -> dict[str, Any]:
    """The peak of the last step, the job that it is in, and the peak of each job."""
    begin, end = next((a, b) for name, a, b in ranges if name == "last step")
    held = most = before = 0
    at = begin
    jobs = [one for one in ranges if begin < one[1] < end]
    peaks: dict[str, int] = {}
    for time, n_bytes in memory:
        held += n_bytes
        if time < begin:
            before = held
        if begin <= time <= end:
            name = next((n for n, a, b in jobs if a <= time <= b), "between")
            peaks[name] = max(held, peaks.get(name, 0))
            if held > most:
                most, at = held, time
    job = next((n for n, a, b in jobs if a <= at <= b), "between jobs")
    return {"tensors": most, "before": before, "job": job, "jobs": peaks}


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contenders", nargs="*")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--n_blocks", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--resident", action="store_true", help="run once more for it")
    parser.add_argument("--jobs", action="store_true", help="the peak of each job")
    arguments = parser.parse_args()
    names = ("tensors", "weights", "state", "before", "resident")
    heads = ("tensors", "weights", "state", "between steps", "resident", "peak in")
    table = Table("MiB at the peak", ("contender", "stage", *heads))
    for contender in arguments.contenders or CONTENDERS:
        for stage, one in enumerate(run(contender, arguments)):
            cells = [_mib(one[name]) if name in one else None for name in names]
            table.add(contender, stage, *cells, one["job"])
            if arguments.jobs:
                print(*(f"{job} {_mib(most)}" for job, most in one["jobs"].items()))
    table.show()
