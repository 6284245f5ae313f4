"""From the options of a run to its processes, its model, its plan and its pipeline.

All processes make the same of them; nothing before `build_pipeline` makes weights.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from zbpp.core import Costs, Placement, RequestError, Schedule, read_costs
from zbpp.pipeline import Pipeline, plan_model
from zbpp.planning import Plan, PlanRequest, is_auto, is_file, make_plan
from zbpp.planning.pipelines import split_of
from zbpp.runtime.partition import partition_layers
from zbpp.runtime.policies import Execution, LossScaler, Numerics, StepPolicy
from zbpp.runtime.support.devices import asked_device
from zbpp.training.launch import is_launched, launch, run_launched
from zbpp.training.options import ModelOptions, RunOptions
from zbpp.training.user_model import UserModel, load_model
from zbpp.tuning.measure import SAFE_MODE

__all__ = [
    "AUTOCAST",
    "build_pipeline",
    "make_optimizer",
    "measures_first",
    "model_of",
    "plan_of",
    "split_layers",
    "start_worker",
]

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Compute dtypes by the names that ``--dtype`` has for them."""

_STAGES, _MICROBATCHES = 2, 8
_BETAS = (0.9, 0.95)  # of AdamW, as usual for language models


def start_worker(
    worker: Callable[[Any, Any], int | None],
    options: Any,
    words: Sequence[str],
    *,
    plan: Callable[[Any], Any] | None = None,
    check: Callable[[Any, Any], None] | None = None,
    grace_s: int = 10,
) -> None:
    """Run a worker on every rank: in torchrun's processes, in new ones, or here.

    Args:
        worker: called with the options and the plan; gives the exit code, if not 0.
        options: of the run.
        words: the command line that asks for it, for new processes.
        plan: makes the plan of the options; None: `plan_of`.
        check: called before any process is started, with the same as the worker.
        grace_s: seconds that processes have to end after a signal.
    """
    plan = plan or plan_of
    if is_launched():
        n = int(os.environ["WORLD_SIZE"])
        if options.stages not in (None, n):
            raise RequestError(
                f"--stages is {options.stages}, but torchrun has started {n} "
                "processes; leave --stages out"
            )
        options = replace(options, stages=n)
        run_launched(lambda: worker(options, plan(options)))
    planned = plan(options)
    if check is not None:
        check(options, planned)
    if planned.n_stages > 1:
        launch(words, planned.n_stages, grace_s=grace_s)
    elif code := worker(options, planned):
        raise SystemExit(code)


def model_of(options: ModelOptions) -> UserModel:
    """The model of a run; layers that zbpp makes have no weights yet."""
    return load_model(
        options.model,
        size=options.size,
        seq=options.seq,
        samples=options.microbatch_size,
        seed=options.seed,
    )


def measures_first(options: RunOptions) -> bool:
    """True if the costs of the layers are measured before the first step: for auto."""
    return is_auto(options.pipeline_schedule_mode) and not options.has_costs


def plan_of(options: RunOptions) -> Plan:
    """Plan the mode, or read the schedule file, and split the layers.

    Where costs are measured first, it is the plan that is measured under.
    """
    mode = options.pipeline_schedule_mode
    model, layers = model_of(options), options.costs_of_layers()
    n_layers = model.n_layers
    if layers is not None and layers.n_layers != n_layers:
        raise RequestError(
            f"{options.layers}: it has costs of {layers.n_layers} layers, but the "
            f"model has {n_layers}; profile this model"
        )
    sizes = (None, None) if is_file(mode) else (_STAGES, _MICROBATCHES)
    request = PlanRequest(
        schedule=mode,
        n_stages=options.stages or sizes[0],
        n_microbatches=options.microbatches or sizes[1],
        costs=layers,
    )
    if measures_first(options):
        request = replace(request, schedule=SAFE_MODE)
    elif layers is None:
        costs = Costs() if options.costs is None else read_costs(options.costs)
        request = replace(request, costs=costs.with_limit(options.memory_limit))
    plan = make_plan(request)
    split = _split(plan.schedule, model)
    schedule = replace(plan.schedule, split=split)
    return replace(plan, schedule=schedule, split=split, has_costs=options.has_costs)


def _split(schedule: Schedule, model: UserModel) -> tuple[int, ...]:
    """Layers of each chunk: the schedule's, or equal blocks."""
    if schedule.split is None:
        return _placed_split(model, schedule.placement)
    return split_of(schedule, None, model.n_layers)  # planned with it


def _placed_split(model: UserModel, placement: Placement) -> tuple[int, ...]:
    """Layers of each chunk of a placement, where no costs of layers are known."""
    if model.is_text:
        return tuple(split_layers(model.n_layers, placement.n_chunks))
    ranges = partition_layers(model.n_layers, placement.n_chunks)
    return tuple(len(layers) for layers in ranges)


def split_layers(n_layers: int, n_chunks: int) -> list[int]:
    """Layers of each chunk: even numbers of blocks, then embedding and head.

    Embedding and head do far less work than a block, so they come on top of the
    first and the last chunk's share, unless there are too few blocks for that.

    >>> split_layers(10, 4)
    [3, 2, 2, 3]
    """
    if n_layers - 2 < n_chunks:
        return [len(layers) for layers in partition_layers(n_layers, n_chunks)]
    counts = [len(blocks) for blocks in partition_layers(n_layers - 2, n_chunks)]
    counts[0] += 1
    counts[-1] += 1
    return counts


def build_pipeline(
    options: RunOptions,
    plan: Plan,
    model: UserModel,
    *,
    lr: float = 0.0,
    clip_grad_norm: float | None = None,
) -> Pipeline:
    """Make the pipeline of a run.

    Args:
        options: of the run.
        plan: to run; where costs are measured first, only its sizes count.
        model: of the run.
        lr: learning rate of the optimizer.
        clip_grad_norm: largest norm of the gradient.
    """
    schedule = plan.schedule
    settings: dict[str, Any] = {
        "loss_fn": model.loss_fn or _model_loss,
        "optimizer": partial(make_optimizer, lr),
        "device": asked_device(options.device),
        "numerics": Numerics(autocast=AUTOCAST[options.dtype], seed=options.seed),
        "step": StepPolicy(
            post_validation=options.enable_optimizer_post_validation,
            loss_scale=LossScaler() if options.dtype == "fp16" else None,
        ),
        "execution": Execution(watch=measures_first(options)),
    }
    if measures_first(options):
        plan = plan_model(
            model.layered,
            "auto",
            n_microbatches=schedule.n_microbatches,
            n_stages=schedule.n_stages,
            memory_limit=options.memory_limit,
            example=model.batch(schedule.n_microbatches),
            **settings,
        )
    return Pipeline(model.layered, plan, clip_grad_norm=clip_grad_norm, **settings)


def _model_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a model whose last layer has put it out."""
    return outputs


def make_optimizer(lr: float, parameters: list[nn.Parameter]) -> AdamW:
    """Make the optimizer of a stage."""
    return AdamW(parameters, lr=lr, betas=_BETAS, weight_decay=0.1, fused=True)
