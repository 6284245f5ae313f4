"""Peak memory of every stage in a real run, by the allocator's own events.

One process a stage, with its own layers only; the profiler counts from the start on.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from parts.memory_events import events_of, profiled
from parts.memory_models import CONFIGURATIONS, Configuration
from torch import Tensor
from torch.profiler import record_function

import zbpp
from zbpp.runtime.comm.links import PendingSum
from zbpp.runtime.support.pytree import map_tensors

__all__ = ["real_peaks"]

N_STEPS = 3


def real_peaks(name: str, mode: str, n_stages: int, n_microbatches: int) -> list[int]:
    """Bytes by stage, in the last of some post-validated steps."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(
            _stage, (folder, name, mode, n_stages, n_microbatches), nprocs=n_stages
        )
        return [
            int((Path(folder) / f"peak{stage}").read_text())
            for stage in range(n_stages)
        ]


def _stage(
    rank: int, folder: str, name: str, mode: str, n_stages: int, n_microbatches: int
) -> None:
    torch.set_num_threads(1)
    one = CONFIGURATIONS[name]
    store = dist.FileStore(f"{folder}/store", n_stages)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n_stages)
    # Sums come late, so that every step is speculative, as in a long pipeline.
    PendingSum.done = lambda self: self._total is not None  # type: ignore[method-assign]
    with profiled() as run:
        _train(one, mode, n_microbatches)
    memory, ranges = events_of(run)
    begin, end = next((a, b) for label, a, b in ranges if label == "last step")
    held = most = 0
    for time, n_bytes in memory:
        held += n_bytes
        if begin <= time <= end:
            most = max(most, held)
    (Path(folder) / f"peak{rank}").write_text(str(most))
    dist.destroy_process_group()


def _train(one: Configuration, mode: str, n_microbatches: int) -> None:
    torch.manual_seed(0)
    layers, (x, t), loss_fn = one.build()
    n_layers = len(layers)

    def build(own: range) -> list[Any]:
        return [layers[i] for i in own]

    pipeline = zbpp.Pipeline(
        zbpp.layers_from(build, n_layers=n_layers),
        loss_fn=loss_fn,
        optimizer=torch.optim.AdamW,
        schedule=mode,
        n_microbatches=n_microbatches,
        clip_grad_norm=1e9,
        numerics=zbpp.Numerics(autocast=one.autocast),
        step=zbpp.StepPolicy(post_validation=mode.startswith("ZB") or None),
    )
    mine = {id(layer) for _, layer in pipeline.named_layers()}
    layers[:] = [layer if id(layer) in mine else None for layer in layers]  # type: ignore[misc]

    def whole(tensor: Tensor) -> Tensor:
        return torch.cat([tensor] * n_microbatches)

    inputs = map_tensors(x, whole) if pipeline.needs_inputs else None
    targets = map_tensors(t, whole) if pipeline.needs_targets else None
    del x, t
    for step in range(N_STEPS):
        label = "job last step" if step == N_STEPS - 1 else "job a step"
        with record_function(label):
            pipeline.step(inputs, targets)
    pipeline.close()
