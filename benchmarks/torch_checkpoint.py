"""What torch.distributed.checkpoint does of what a checkpoint of a pipeline has to do.

    python benchmarks/torch_checkpoint.py [--mib 256]

Every row is an experiment, with torch's safetensors storage and with `zbpp.checkpoint`.
Run it with a new torch, to see whether something of ours can go.
"""

import argparse
import datetime
import hashlib
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parts.table import Table
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as optimizers

import zbpp

STATE = {f"w{i}": torch.full((3,), float(i)) for i in range(5)}


def write(state: dict[str, Any], folder: Path, **more: Any) -> None:
    """Save by torch, as one process."""
    writer = dcp.HuggingFaceStorageWriter(str(folder), **more)
    dcp.save(state, storage_writer=writer, no_dist=True)


def read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load by torch into tensors, in place."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def pipeline_of(value: Tensor, name: str = "w") -> zbpp.Pipeline:
    """A pipeline of one stage that holds a tensor."""
    layer = nn.Module()
    layer.register_buffer(name, value)
    layer.forward = lambda x: x  # type: ignore[method-assign, assignment]
    return zbpp.Pipeline(
        [layer, nn.Linear(1, 1)],
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        schedule="1F1B",
        n_stages=1,
        n_microbatches=1,
    )


def saved(value: Tensor, folder: Path) -> Path:
    """Save a tensor by zbpp; its safetensors file."""
    torch.manual_seed(0)
    with pipeline_of(value) as pipeline:
        pipeline.save(folder, extra={"lr": 0.1}, wait=True)
    return folder / "step-00000000" / "stage-0.safetensors"


def loaded(value: Tensor, folder: Path) -> Any:
    """Load by zbpp into a tensor of the kind of this one."""
    with pipeline_of(torch.zeros_like(value)) as pipeline:
        extra = pipeline.load(folder)
        return extra, dict(pipeline.named_buffers())["layers.0.w"]


def outcome(work: Callable[[], Any]) -> str:
    """What comes of it, in short."""
    try:
        return f"gives {work()}"
    except BaseException as error:  # torch's CheckpointException is no Exception
        last = str(error).strip().splitlines()[-1]
        kind = "" if isinstance(error, Exception) else ", no Exception"
        return f"{type(error).__name__}{kind}: {last[-70:]}"


def same_bytes(torchs: Path, ours: Path) -> tuple[str, str]:
    """The same state saved ten times: how many different files?"""
    hashes: tuple[set[str], set[str]] = set(), set()
    for number in range(10):
        write(STATE, torchs / str(number))
        files = (
            next((torchs / str(number)).glob("*.safetensors")),
            saved(torch.arange(9.0), ours / str(number)),
        )
        for found, file in zip(hashes, files, strict=True):
            found.add(hashlib.sha256(file.read_bytes()).hexdigest())
    return f"{len(hashes[0])} different files of 10", f"{len(hashes[1])}"


def number(torchs: Path, ours: Path) -> tuple[str, str]:
    """A number beside the tensors."""
    write({"w": torch.ones(1), "lr": 0.1}, torchs)
    saved(torch.ones(1), ours)
    return (
        outcome(lambda: read({"w": torch.zeros(1)}, torchs)),
        outcome(lambda: loaded(torch.ones(1), ours)[0]),
    )


def channels_last(torchs: Path, ours: Path) -> tuple[str, str]:
    """A parameter whose memory has another order."""
    value = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    return (
        outcome(lambda: write({"w": value}, torchs)),
        outcome(lambda: saved(value, ours).name),
    )


def flipped(torchs: Path, ours: Path) -> tuple[str, str]:
    """One bit of the file flipped."""
    value = torch.tensor([1.5, 2.5])
    write({"w": value}, torchs)
    for file in (next(torchs.glob("*.safetensors")), saved(value, ours)):
        content = bytearray(file.read_bytes())
        content[-1] ^= 64
        file.write_bytes(content)
    return (
        outcome(lambda: read({"w": torch.zeros(2)}, torchs)["w"].tolist()),
        outcome(lambda: loaded(value, ours)),
    )


def another_dtype(torchs: Path, ours: Path) -> tuple[str, str]:
    """Loaded into integers."""
    write({"w": torch.tensor([1.5])}, torchs)
    saved(torch.tensor([1.5]), ours)
    target = torch.zeros(1, dtype=torch.int64)
    return (
        outcome(lambda: read({"w": target}, torchs)["w"].tolist()),
        outcome(lambda: loaded(target, ours)),
    )


def stray(torchs: Path, ours: Path) -> tuple[str, str]:
    """A file of another run, in the folder."""
    write({"w": torch.ones(1)}, torchs)
    folder = saved(torch.ones(1), ours).parent
    save_file({"w": torch.full((1,), 7.0)}, torchs / "z.safetensors")
    save_file({"model/layers.0.w": torch.full((1,), 7.0)}, folder / "z.safetensors")
    return (
        outcome(lambda: read({"w": torch.zeros(1)}, torchs)["w"].tolist()),
        outcome(lambda: loaded(torch.ones(1), ours)[1].tolist()),
    )


def read_by_torch(torchs: Path, ours: Path) -> tuple[str, str]:
    """Torch's reader, in the folder of either."""
    write({"w": torch.ones(1)}, torchs)
    folder, name = saved(torch.ones(1), ours).parent, "model/layers.0.w"
    return (
        outcome(lambda: read({"w": torch.zeros(1)}, torchs)["w"].tolist()),
        outcome(lambda: read({name: torch.zeros(1)}, folder)[name].tolist()),
    )


def peak_over(work: Callable[[], object]) -> str:
    """Memory of this process's own over that at the start, while it works, in MiB."""

    def own() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(x.split()[1]) / 1024 for x in lines if x.startswith("RssAnon"))

    start, seen, has_ended = own(), [0.0], threading.Event()

    def watch() -> None:
        while not has_ended.wait(0.002):
            seen.append(own())

    watcher = threading.Thread(target=watch)
    watcher.start()
    work()
    has_ended.set()
    watcher.join()
    return f"{max(0.0, max(seen) - start):.0f} MiB"


def memory(mib: int, torchs: Path, ours: Path) -> tuple[str, str]:
    """Host memory that a save needs beside a state, staged before."""
    value = torch.ones(mib * 2**18)
    with pipeline_of(value) as pipeline:
        pipeline.save(ours, wait=True)  # its host copies are made here
        more = peak_over(lambda: pipeline.save(ours, wait=True))
    return peak_over(lambda: write({"w": value}, torchs)), more


def run_rank(rank: int, folder: str, own_group: bool, tell: Any) -> None:
    """Sums of the training between the collectives of torch's background thread."""
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=10),
    )
    group = dist.new_group() if own_group else None
    try:
        for step in range(5):
            writer = dcp.HuggingFaceStorageWriter(
                f"{folder}/{step}", save_distributed=True
            )
            state = {f"{rank}.{i}": torch.ones(1000) for i in range(200)}
            saving = dcp.async_save(state, storage_writer=writer, process_group=group)
            for _ in range(200):
                dist.all_reduce(torch.ones(4))
            saving.result()
        tell.put("5 saves beside 1,000 sums")
    except BaseException as error:
        tell.put(f"{type(error).__name__}: {str(error)[-60:]}")
    tell.close()
    tell.join_thread()
    os._exit(0)


def in_background(own_group: bool, torchs: Path, ours: Path) -> tuple[str, None]:
    """Saves in the background, while the main thread sums over the same processes.

    Ours make no collective, so there is nothing to measure.
    """
    torchs.mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    processes = [
        context.Process(target=run_rank, args=(r, str(torchs), own_group, answers))
        for r in range(2)
    ]
    for process in processes:
        process.start()
    texts = [answers.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(20)
    return texts[0], None


class Counting(torch.optim.AdamW):
    """Counts its steps."""

    n_steps = 0

    def step(self, closure: Any = None) -> Any:
        """Step."""
        self.n_steps += 1
        return super().step(closure)


def pipeline_with(layer: nn.Module, optimizer: Any) -> zbpp.Pipeline:
    """A pipeline of one layer."""
    return zbpp.Pipeline(
        [layer],
        loss_fn=nn.functional.mse_loss,
        optimizer=optimizer,
        schedule="1F1B",
        n_stages=1,
        n_microbatches=1,
    )


def optimizer_state(torchs: Path, ours: Path) -> tuple[str, str]:
    """Moments in fp32 of parameters in bf16, loaded into a new optimizer."""
    model = nn.Linear(2, 2, bias=False).bfloat16()
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.ones(2, 2))
    first, second = (Counting(model.parameters()) for _ in range(2))
    first.state[model.weight] = {"step": torch.ones(()), **moments}
    taken = optimizers.get_optimizer_state_dict(model, first)
    optimizers.set_optimizer_state_dict(model, second, taken)
    with pipeline_with(model, Counting) as saving:
        saving.optimizers[0].state[model.weight] = dict(first.state[model.weight])
        saving.save(ours, wait=True)
    with pipeline_with(model, Counting) as loading:
        loading.load(ours)
        mine: Any = loading.optimizers[0]
    torchs_end, ours_end = (
        f"{one.n_steps} steps, moments {one.state[model.weight]['exp_avg'].dtype}"
        for one in (second, mine)
    )
    return torchs_end, ours_end


def two_rates(torchs: Path, ours: Path) -> tuple[str, str]:
    """A parameter that two optimizers step, with rates .1 and .2."""
    model = nn.Linear(1, 1, bias=False)

    def both(parameters: Any, rates: tuple[float, float] = (0.1, 0.2)) -> list[Any]:
        parameters = list(parameters)
        return [torch.optim.SGD(parameters, lr=lr) for lr in rates]

    flat = optimizers.StateDictOptions(flatten_optimizer_state_dict=True)
    taken = optimizers.get_optimizer_state_dict(
        model, both(model.parameters()), options=flat
    )
    with pipeline_with(model, both) as saving:
        saving.save(ours, wait=True)
    with pipeline_with(model, lambda ps: both(ps, (7.0, 7.0))) as loading:
        loading.load(ours)
        rates = [one.param_groups[0]["lr"] for one in loading.optimizers]
    return f"keeps {[taken[key] for key in taken if key.endswith('.lr')]}", f"{rates}"


def main() -> None:
    """Run every experiment, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="of the state in memory")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()  # torch logs the stack of what it raises then
    table = Table(
        f"Checkpoints by torch {torch.__version__} and by zbpp", ("", "torch", "zbpp")
    )
    experiments: dict[str, Callable[[Path, Path], tuple[str, str | None]]] = {
        "the same state, saved ten times": same_bytes,
        "a number beside the tensors": number,
        "a parameter in channels_last": channels_last,
        "one bit flipped": flipped,
        "1.5 loaded into integers": another_dtype,
        "a stray file in the folder": stray,
        "torch's reader in either folder": read_by_torch,
        f"memory beside {options.mib} MiB": partial(memory, options.mib),
        "optimizer state of bf16 parameters": optimizer_state,
        "two optimizers of one parameter": two_rates,
        "background, the training's group": partial(in_background, False),
        "background, a group of its own": partial(in_background, True),
    }
    with tempfile.TemporaryDirectory() as folder:
        for place, (need, experiment) in enumerate(experiments.items()):
            torchs, ours = (Path(folder) / f"{place}-{who}" for who in "to")
            table.add(need, *experiment(torchs, ours))
            print(*table.rows[-1], sep=" | ", file=sys.stderr)
    table.show()


if __name__ == "__main__":
    main()
