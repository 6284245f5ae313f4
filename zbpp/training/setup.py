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

from zbpp.core import Costs, LayerCosts, Placement, RequestError, Schedule, read_costs
from zbpp.memory import layer_memory
from zbpp.models.configs.causal_lm import read_config
from zbpp.pipeline import Pipeline, plan_model
from zbpp.planning import Plan, PlanRequest, is_auto, is_file, make_plan
from zbpp.planning.pipelines import split_of
from zbpp.runtime.partition import partition_layers
from zbpp.runtime.policies import Execution, LossScaler, Numerics, StepPolicy
from zbpp.runtime.support.devices import asked_device
from zbpp.training.launch import is_launched, launch, run_launched
from zbpp.training.llama import VOCABULARY, LlamaConfig
from zbpp.training.options import HF, TrainOptions
from zbpp.training.text import load_corpus
from zbpp.training.user_model import UserModel, load_model
from zbpp.tuning.measure import SAFE_MODE

__all__ = [
    "AUTOCAST",
    "build_pipeline",
    "check",
    "estimate_layers",
    "measures_first",
    "model_of",
    "plan_of",
    "random_batch",
    "split_layers",
    "start_worker",
]

Worker = Callable[[TrainOptions, Plan], int | None]
"""Gives the exit code, if it is not 0."""

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Compute dtypes by the names that ``--dtype`` has for them."""

_STAGES, _MICROBATCHES = 2, 8
_BETAS = (0.9, 0.95)  # of AdamW, as usual for language models
_GRACE_S, _SAVING_GRACE_S = 10, 60
"""Seconds that processes have to end after a signal, and to save before that."""


def start_worker(
    worker: Worker,
    options: TrainOptions,
    words: Sequence[str],
    *,
    check: Callable[[TrainOptions, Plan], None],
) -> None:
    """Run a worker on every rank: in torchrun's processes, in new ones, or here.

    Args:
        worker: called with the options and the plan.
        options: of the run.
        words: the command line that asks for it, for new processes.
        check: called before any process is started, with the same as the worker.
    """
    if is_launched():
        run_launched(partial(_share, worker, options))
    plan = plan_of(options)
    check(options, plan)
    n = plan.schedule.n_stages
    if n > 1:
        grace_s = _SAVING_GRACE_S if options.save_dir is not None else _GRACE_S
        launch(words, n, grace_s=grace_s)
    elif code := worker(options, plan):
        raise SystemExit(code)


def _share(worker: Worker, options: TrainOptions) -> int | None:
    """The share of one of torchrun's processes, one for each stage."""
    n = int(os.environ["WORLD_SIZE"])
    if options.stages not in (None, n):
        raise RequestError(
            f"--stages is {options.stages}, but torchrun has started {n} processes; "
            "leave --stages out"
        )
    options = replace(options, stages=n)
    return worker(options, plan_of(options))


def check(options: TrainOptions, plan: Plan) -> None:
    """Find before any process is started what would stop a training."""
    _split(plan.schedule, model_of(options).n_layers)
    asked_device(options.device)
    load_corpus(options.data, seq=options.seq)


def model_of(options: TrainOptions) -> UserModel:
    """The model that is trained; its weights are not made."""
    samples = options.microbatch_size
    if options.model is None:
        return LlamaConfig.of(options, seed=options.seed).loaded(samples)
    path = options.model.removeprefix(HF)
    if path == options.model:
        raise RequestError(
            f"--model {path}: zbpp train takes hf:PATH, a config.json of transformers "
            "or the folder of a checkpoint; another model is trained by a script, with "
            "zbpp.Pipeline"
        )
    if (n_tokens := read_config(path).vocab_size) < VOCABULARY:
        raise RequestError(
            f"{path}: its vocabulary has {n_tokens} tokens, and a token of the text is "
            f"a byte; it needs {VOCABULARY} or more"
        )
    return load_model(
        options.model,
        seq=options.seq,
        samples=samples,
        seed=options.seed,
        reads_weights=True,
    )


def measures_first(options: TrainOptions) -> bool:
    """True if the costs of the layers are measured before the first step: for auto."""
    return is_auto(options.pipeline_schedule_mode) and not options.has_costs


def plan_of(options: TrainOptions) -> Plan:
    """Plan the mode, or read the schedule file; with costs per layer also the split.

    Where costs are measured first, it is the plan that is measured under.
    """
    mode = options.pipeline_schedule_mode
    n_layers, layers = model_of(options).n_layers, options.costs_of_layers()
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
    if layers is None:
        request = replace(request, split=partial(_placed_split, n_layers))
    return replace(make_plan(request), has_costs=options.has_costs)


def _split(schedule: Schedule, n_layers: int) -> tuple[int, ...]:
    """Layers of each chunk: the schedule's, or equal blocks."""
    if schedule.split is None:
        return _placed_split(n_layers, schedule.placement)
    return split_of(schedule, None, n_layers)  # planned with it


def _placed_split(n_layers: int, placement: Placement) -> tuple[int, ...]:
    """Layers of each chunk of a placement, where no costs of layers are known."""
    return tuple(split_layers(n_layers, placement.n_chunks))


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
    options: TrainOptions, plan: Plan, loaded: UserModel | None = None
) -> Pipeline:
    """Make the pipeline of a run.

    Args:
        options: of the run.
        plan: to run; where costs are measured first, only its sizes count.
        loaded: a user's model, under the schedule of the plan; None: that of the
            options.
    """
    schedule = plan.schedule
    model = loaded or model_of(options)
    measures = loaded is None and measures_first(options)
    settings: dict[str, Any] = {
        "loss_fn": model.loss_fn or _model_loss,
        "optimizer": partial(_make_optimizer, options),
        "device": asked_device(options.device),
        "numerics": Numerics(autocast=AUTOCAST[options.dtype], seed=options.seed),
        "step": StepPolicy(
            post_validation=options.enable_optimizer_post_validation,
            loss_scale=LossScaler() if options.dtype == "fp16" else None,
        ),
        "execution": Execution(watch=measures),
    }
    if loaded is not None:
        return Pipeline(model.layered, schedule, **settings)
    if measures:
        plan = plan_model(
            model.layered,
            "auto",
            n_microbatches=schedule.n_microbatches,
            n_stages=schedule.n_stages,
            memory_limit=options.memory_limit,
            example=model.batch(schedule.n_microbatches),
            **settings,
        )
    else:
        split = _split(schedule, model.n_layers)
        plan = replace(plan, schedule=replace(schedule, split=split), split=split)
    clip_grad_norm = options.clip_grad_norm
    return Pipeline(model.layered, plan, clip_grad_norm=clip_grad_norm, **settings)


def _model_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a model whose last layer has put it out."""
    return outputs


def _make_optimizer(options: TrainOptions, parameters: list[nn.Parameter]) -> AdamW:
    """Make the optimizer of a stage."""
    return AdamW(parameters, lr=options.lr, betas=_BETAS, weight_decay=0.1, fused=True)


def random_batch(options: TrainOptions, n_microbatches: int) -> tuple[Any, Any]:
    """Inputs and targets of the sizes of a step, for the model of the options."""
    return model_of(options).batch(n_microbatches)


def estimate_layers(
    options: TrainOptions, loaded: UserModel | None = None
) -> LayerCosts:
    """Estimate what the layers of a model hold, on fake tensors: some seconds.

    Args:
        options: of the run.
        loaded: the model; None: that of the options.
    """
    model = loaded or model_of(options)
    return layer_memory(
        model.model,
        (model.inputs, model.targets),
        model.loss_fn,
        n_layers=model.n_layers,
        optimizer=partial(_make_optimizer, options),
        autocast=AUTOCAST[options.dtype],
    )
