"""From the options of a run to its pipeline and optimizer."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

from zbpp.core import LayerCosts
from zbpp.memory import layer_memory
from zbpp.memory.layers import Tracing
from zbpp.models import layered_of
from zbpp.models.configs.text_model import TextModel
from zbpp.pipeline import Pipeline, plan_model
from zbpp.planning import Plan
from zbpp.runtime.parallel.mesh import make_mesh
from zbpp.runtime.policies import (
    DataParallel,
    Execution,
    LossScaler,
    Numerics,
    Patience,
    StepPolicy,
)
from zbpp.training.llama import dealt_out
from zbpp.training.options import Train
from zbpp.training.setup import device_of, measures_first, model_of
from zbpp.training.splits import asked_recompute, asked_split, run_split

__all__ = [
    "build_pipeline",
    "estimate_layers",
    "make_optimizer",
    "mesh_of",
    "numerics_of",
    "tracing_of",
]

_BETAS = (0.9, 0.95)  # of AdamW, as usual for language models
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Compute dtypes by the names that ``--dtype`` has for them."""


def build_pipeline(options: Train, plan: Plan) -> Pipeline:
    """Make the pipeline of a training.

    Args:
        options: of the run.
        plan: to run; where `measures_first`, only its sizes count.
    """
    schedule = plan.schedule
    text_model = model_of(options)
    made_of = text_model.given()
    model = layered_of(made_of["model"], made_of.get("n_layers"))
    loss_fn, optimizer = made_of.get("loss_fn"), partial(make_optimizer, options)
    mesh = mesh_of(options, schedule.n_stages)
    processes: DataParallel | None = None
    if mesh is not None:
        if options.tensor_parallel > 1:
            model = replace(model, build=dealt_out(model.build, mesh["tp"]))
        processes = DataParallel(
            mesh=mesh,
            shard=options.shard,
            alternating_buffers=options.alternating_buffers,
        )
    device = device_of(options)
    numerics = replace(numerics_of(options), seed=made_of.get("seed"))
    step = StepPolicy(
        post_validation=options.enable_optimizer_post_validation,
        patience=Patience(
            failures=options.post_validation_failures,
            window=options.post_validation_window,
            clean=options.post_validation_clean,
        ),
        max_consecutive_skips=options.max_consecutive_skips,
        loss_scale=LossScaler() if options.dtype == "fp16" else None,
    )
    execution = Execution(
        compile="blocks" if options.compiles else False,
        cuda_graphs=options.cuda_graphs,
        watch=measures_first(options),
        timeout_s=options.timeout_s,
    )
    if measures_first(options):
        plan = plan_model(
            model,
            "auto",
            n_microbatches=schedule.n_microbatches,
            n_stages=schedule.n_stages,
            memory=options.memory_limit,
            example=_example(options, text_model, schedule.n_microbatches),
            split=asked_split(options),
            recompute=asked_recompute(options),
            mesh=processes,
            device=device,
            loss_fn=loss_fn,
            optimizer=optimizer,
            numerics=numerics,
            step=step,
            execution=execution,
        )
    else:
        split = run_split(options, schedule, text_model)
        plan = replace(plan, schedule=replace(schedule, split=split), split=split)
    return Pipeline(
        model,
        plan,
        loss_fn=loss_fn,
        optimizer=optimizer,
        clip_grad_norm=options.clip_grad_norm,
        mesh=processes,
        device=device,
        numerics=numerics,
        step=step,
        execution=execution,
    )


def numerics_of(options: Train) -> Numerics:
    """The numerics of a run."""
    return Numerics(autocast=_AUTOCAST[options.dtype], exact_sums=options.exact_sums)


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


def estimate_layers(options: Train) -> LayerCosts:
    """Estimate what the layers of the model hold, on fake tensors: some seconds."""
    model = model_of(options)
    tokens = torch.zeros(options.microbatch_size, options.seq, dtype=torch.long)
    made_of = model.given()
    return layer_memory(
        made_of["model"],
        model.batch(tokens, tokens),
        made_of.get("loss_fn"),
        optimizer=partial(make_optimizer, options),
        **tracing_of(options, made_of.get("n_layers")),
    )


def tracing_of(options: Train, n_layers: int | None) -> Tracing:
    """The way in which the layers of a run are traced for their memory."""
    return {
        "n_layers": n_layers,
        "autocast": _AUTOCAST[options.dtype],
        "exact_sums": options.exact_sums,
        "compile": "blocks" if options.compiles else False,
    }
