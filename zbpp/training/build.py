"""From the options of a run to its pipeline and optimizer."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

from zbpp.core import Schedule
from zbpp.models.configs.text_model import TextModel
from zbpp.pipeline import Pipeline
from zbpp.runtime.optim.loss_scale import LossScaler
from zbpp.runtime.optim.patience import Patience
from zbpp.runtime.parallel.mesh import make_mesh
from zbpp.training.llama import dealt_out
from zbpp.training.options import Train
from zbpp.training.setup import device_of, measures_first, model_of
from zbpp.training.splits import asked_recompute, asked_split, run_split

__all__ = ["AUTOCAST", "build_pipeline", "make_optimizer", "mesh_of"]

_BETAS = (0.9, 0.95)  # of AdamW, as usual for language models
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Compute dtypes by the names that ``--dtype`` has for them."""


def build_pipeline(options: Train, schedule: Schedule) -> Pipeline:
    """Make the pipeline of a training.

    Args:
        options: of the run.
        schedule: to run; where `measures_first`, only its sizes count.
    """
    model = model_of(options)
    how: dict[str, Any] = {
        "schedule": schedule,
        "split": run_split(options, schedule, model),
    }
    if measures_first(options):
        how = {
            "schedule": "auto",
            "split": asked_split(options),
            "n_microbatches": schedule.n_microbatches,
            "n_stages": schedule.n_stages,
            "memory": options.memory_limit,
            "example": _example(options, model, schedule.n_microbatches),
            "recompute": asked_recompute(options),
        }
    given = model.given()
    if (mesh := mesh_of(options, schedule.n_stages)) is not None:
        how |= {"shard": options.shard, "mesh": mesh}
        how["alternating_buffers"] = options.alternating_buffers
        if options.tensor_parallel > 1:
            given["model"] = dealt_out(given["model"], mesh["tp"])
    return Pipeline(
        **given,
        optimizer=partial(make_optimizer, options),
        **how,
        clip_grad_norm=options.clip_grad_norm,
        post_validation=options.enable_optimizer_post_validation,
        rollback=options.post_validation_rollback,
        patience=Patience(
            failures=options.post_validation_failures,
            window=options.post_validation_window,
            clean=options.post_validation_clean,
        ),
        max_consecutive_skips=options.max_consecutive_skips,
        device=device_of(options),
        autocast=AUTOCAST[options.dtype],
        loss_scale=LossScaler() if options.dtype == "fp16" else None,
        compile="blocks" if options.compile else False,
        cuda_graphs=options.cuda_graphs,
        exact_sums=options.exact_sums,
        timeout_s=options.timeout_s,
    )


def mesh_of(options: Train, n_stages: int) -> DeviceMesh | None:
    """The mesh of a run with replicas or tensor parallelism; None: there are none."""
    if options.n_peers == 1:
        return None
    return make_mesh(
        stages=n_stages,
        data_parallel=options.data_parallel,
        tensor_parallel=options.tensor_parallel,
        device=device_of(options),
        timeout_s=options.timeout_s,
    )


def _example(options: Train, model: TextModel, n_microbatches: int) -> tuple[Any, Any]:
    """A batch of the sizes of a step; what the bytes are makes no difference."""
    windows = n_microbatches * options.microbatch_size
    generator = torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(256, (windows, options.seq + 1), generator=generator)
    return model.batch(tokens[:, :-1], tokens[:, 1:])


def make_optimizer(options: Train, parameters: list[nn.Parameter]) -> AdamW:
    """Make the optimizer of a stage.

    Its kernel takes no DTensors beside plain tensors: they get a group of their own.
    """
    kinds: dict[type, list[nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault(type(p), []).append(p)
    return AdamW(
        [{"params": alike} for alike in kinds.values()],
        lr=options.lr,
        betas=_BETAS,
        weight_decay=options.weight_decay,
        fused=True,
    )
