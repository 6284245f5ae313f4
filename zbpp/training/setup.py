"""From the options of a run to its model, its plan and its pipeline.

All processes make the same of them; nothing before `build_pipeline` makes weights.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from zbpp.core import (
    Costs,
    LayerCosts,
    Placement,
    RequestError,
    Schedule,
    read_costs,
)
from zbpp.memory import layer_memory
from zbpp.models import layered_of
from zbpp.models.configs.byte_model import TextModel, read_causal_lm
from zbpp.pipeline import Pipeline, plan_model
from zbpp.planning import Plan, PlanRequest, is_auto, is_file, make_plan
from zbpp.planning.pipelines import split_of
from zbpp.runtime.partition import partition_layers
from zbpp.runtime.policies import (
    Execution,
    LossScaler,
    Numerics,
    StepPolicy,
)
from zbpp.runtime.support.devices import asked_device
from zbpp.training.data import load_corpus
from zbpp.training.llama import LlamaConfig
from zbpp.training.options import HF, TrainOptions
from zbpp.training.resume import check_saving
from zbpp.training.user_model import UserModel
from zbpp.tuning.measure import SAFE_MODE

__all__ = [
    "build_pipeline",
    "check",
    "costs_of",
    "estimate_layers",
    "layers_of",
    "measures_first",
    "model_of",
    "plan_of",
    "random_batch",
    "run_split",
    "split_layers",
]

_STAGES, _MICROBATCHES = 2, 8
_BETAS = (0.9, 0.95)  # of AdamW, as usual for language models
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Compute dtypes by the names that ``--dtype`` has for them."""


def model_of(options: TrainOptions) -> TextModel:
    """The model that is trained; its weights are not made."""
    if options.model is not None:
        path = options.model.removeprefix(HF)
        if path == options.model:
            raise RequestError(
                f"--model {path}: zbpp train takes hf:PATH, a config.json of "
                "transformers or the folder of a checkpoint; another model is trained "
                "by a script, with zbpp.Pipeline"
            )
        return read_causal_lm(path, seq=options.seq, seed=options.seed)
    return LlamaConfig.of(options, seed=options.seed)


def _has_no_costs(options: TrainOptions) -> bool:
    return options.costs is options.layers is None


def measures_first(options: TrainOptions) -> bool:
    """True if the costs of the layers are measured before the first step.

    So they are for ``auto``, unless a file has them.
    """
    return is_auto(options.pipeline_schedule_mode) and _has_no_costs(options)


def costs_of(options: TrainOptions) -> Costs:
    """Costs of chunks to plan for."""
    costs = Costs() if options.costs is None else read_costs(options.costs)
    if measures_first(options):  # the limit is of what will be measured
        return costs
    return costs.with_limit(options.memory_limit)


def layers_of(options: TrainOptions, n_layers: int) -> LayerCosts | None:
    """Costs per layer to plan for; None: there are none."""
    layers = options.costs_of_layers()
    if layers is not None and layers.n_layers != n_layers:
        raise RequestError(
            f"{options.layers}: it has costs of {layers.n_layers} layers, but the "
            f"model has {n_layers}; profile this model"
        )
    return layers


def plan_of(options: TrainOptions) -> Plan:
    """Plan the mode, or read the schedule file; with costs per layer also the split.

    Where `measures_first`, it is the one that is measured under.
    """
    mode = options.pipeline_schedule_mode
    n_stages, n_microbatches = options.stages, options.microbatches
    if not is_file(mode):
        n_stages = n_stages or _STAGES
        n_microbatches = n_microbatches or _MICROBATCHES
    model = model_of(options)
    layers = layers_of(options, model.n_layers)
    request = PlanRequest(
        schedule=mode,
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        costs=layers,
    )
    if layers is None:
        split = partial(_placed_split, model)
        request = replace(request, costs=costs_of(options), split=split)
    if measures_first(options):
        request = replace(request, schedule=SAFE_MODE, costs=None, recompute=None)
    return replace(make_plan(request), has_costs=not _has_no_costs(options))


def run_split(schedule: Schedule, model: TextModel) -> tuple[int, ...]:
    """Layers of each chunk: the schedule's, or equal blocks."""
    if schedule.split is None:
        return _placed_split(model, schedule.placement)
    return split_of(schedule, None, model.n_layers)  # planned with it


def _placed_split(model: TextModel, placement: Placement) -> tuple[int, ...]:
    """Layers of each chunk of a placement, where no costs of layers are known."""
    return tuple(split_layers(model, placement.n_chunks))


def split_layers(model: TextModel, n_chunks: int) -> list[int]:
    """Layers of each chunk: even numbers of blocks, then embedding and head.

    Embedding and head do far less work than a block, so they come on top of the
    first and the last chunk's share, unless there are too few blocks for that.

    >>> split_layers(LlamaConfig(n_blocks=8), 4)
    [3, 2, 2, 3]
    """
    if model.n_blocks < n_chunks:
        return [len(layers) for layers in partition_layers(model.n_layers, n_chunks)]
    counts = [len(blocks) for blocks in partition_layers(model.n_blocks, n_chunks)]
    counts[0] += 1
    counts[-1] += 1
    return counts


def check(options: TrainOptions, plan: Plan) -> None:
    """Find before any process is started what would stop the run."""
    model = model_of(options)
    run_split(plan.schedule, model)
    device = asked_device(options.device)
    if options.dtype == "fp16":
        _check_half(device)
    check_saving(options)
    load_corpus(options.data, seq=options.seq)


def _check_half(device: torch.device) -> None:
    try:
        half = torch.zeros(2, 2, dtype=torch.float16, device=device)
        torch.nn.functional.layer_norm(half @ half, (2,))
    except RuntimeError as error:
        raise RequestError(
            f"--dtype fp16: {device} does not compute in it ({error}); use bf16 or fp32"
        ) from error


def build_pipeline(
    options: TrainOptions, plan: Plan, loaded: UserModel | None = None
) -> Pipeline:
    """Make the pipeline of a run.

    Args:
        options: of the run.
        plan: to run; where `measures_first`, only its sizes count.
        loaded: a user's model, under the schedule of the plan; None: that of the
            options.
    """
    schedule = plan.schedule
    made_of = _given(options, loaded)
    model = layered_of(made_of["model"], made_of.get("n_layers"))
    settings: dict[str, Any] = {
        "loss_fn": made_of.get("loss_fn") or (loaded and _own_loss),
        "optimizer": partial(_make_optimizer, options),
        "device": asked_device(options.device),
        "numerics": Numerics(
            autocast=_AUTOCAST[options.dtype], seed=made_of.get("seed")
        ),
        "step": StepPolicy(
            post_validation=options.enable_optimizer_post_validation,
            loss_scale=LossScaler() if options.dtype == "fp16" else None,
        ),
        "execution": Execution(watch=loaded is None and measures_first(options)),
    }
    if loaded is not None:
        return Pipeline(model, schedule, **settings)
    if measures_first(options):
        plan = plan_model(
            model,
            "auto",
            n_microbatches=schedule.n_microbatches,
            n_stages=schedule.n_stages,
            memory_limit=options.memory_limit,
            example=random_batch(options, schedule.n_microbatches),
            **settings,
        )
    else:
        split = run_split(schedule, model_of(options))
        plan = replace(plan, schedule=replace(schedule, split=split), split=split)
    return Pipeline(model, plan, clip_grad_norm=options.clip_grad_norm, **settings)


def _given(options: TrainOptions, loaded: UserModel | None) -> dict[str, Any]:
    """Return what `zbpp.Pipeline` is given of the model."""
    if loaded is None:
        return model_of(options).given()
    kwargs = {"model": loaded.model, "loss_fn": loaded.loss_fn}
    return {**kwargs, "n_layers": loaded.n_layers} if callable(loaded.model) else kwargs


def _own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a model whose last layer has put it out."""
    return outputs


def _make_optimizer(options: TrainOptions, parameters: list[nn.Parameter]) -> AdamW:
    """Make the optimizer of a stage."""
    return AdamW(parameters, lr=options.lr, betas=_BETAS, weight_decay=0.1, fused=True)


def random_batch(options: TrainOptions, n_microbatches: int) -> tuple[Any, Any]:
    """Inputs and targets of the sizes of a step, for the model of the options."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (n_microbatches * options.microbatch_size, options.seq)
    tokens = torch.randint(256, shape, generator=generator)
    return model_of(options).batch(tokens, tokens)


def estimate_layers(
    options: TrainOptions, loaded: UserModel | None = None
) -> LayerCosts:
    """Estimate what the layers of a model hold, on fake tensors: some seconds.

    Args:
        options: of the run.
        loaded: the model; None: that of the options.
    """
    made_of = _given(options, loaded)
    batch = random_batch(options, 1)
    if loaded is not None:
        batch = (loaded.inputs, loaded.targets)
    return layer_memory(
        made_of["model"],
        batch,
        made_of.get("loss_fn"),
        n_layers=made_of.get("n_layers"),
        optimizer=partial(_make_optimizer, options),
        autocast=_AUTOCAST[options.dtype],
    )
