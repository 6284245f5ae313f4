"""From the options of a run to its model, its plan and its pipeline.

All processes make the same of them; nothing before `build_pipeline` makes weights.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from zbpp.pipeline import Pipeline, plan_model
from zbpp.planning import Plan, PlanRequest, is_file
from zbpp.planning.make import plan_pipeline
from zbpp.runtime.policies import Execution, LossScaler, Numerics, StepPolicy
from zbpp.runtime.support.devices import asked_device
from zbpp.training.options import ModelOptions, RunOptions
from zbpp.training.user_model import UserModel, load_model
from zbpp.tuning import SAFE_MODE

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Compute dtypes by the names that ``--dtype`` has for them."""

_STAGES, _MICROBATCHES = 2, 8
_BETAS = (0.9, 0.95)  # of AdamW, as usual for language models


def model_of(options: ModelOptions) -> UserModel:
    """The model of a run; layers that zbpp makes have no weights yet."""
    return load_model(
        options.model,
        size=options.size,
        seq=options.seq,
        samples=options.microbatch_size,
        seed=options.seed,
    )


def plan_of(options: RunOptions) -> Plan:
    """Plan the mode, or read the schedule file, as `zbpp.Pipeline` does.

    Where costs are measured first, it is the plan that is measured under.
    """
    mode = options.pipeline_schedule_mode
    stages, microbatches = (None, None) if is_file(mode) else (_STAGES, _MICROBATCHES)
    request = PlanRequest(
        schedule=SAFE_MODE if options.measures_first else mode,
        n_stages=options.stages or stages,
        n_microbatches=options.microbatches or microbatches,
        costs=options.read_costs(),
        memory_limit=None if options.measures_first else options.memory_limit,
    )
    return plan_pipeline(request, n_layers=model_of(options).n_layers, n_ranks=1)


def build_pipeline(
    options: RunOptions,
    plan: Plan,
    *,
    lr: float = 0.0,
    clip_grad_norm: float | None = None,
) -> tuple[Pipeline, UserModel]:
    """Make the pipeline of a run, and its model.

    Args:
        options: of the run.
        plan: to run; where costs are measured first, only its sizes count.
        lr: learning rate of the optimizer.
        clip_grad_norm: largest norm of the gradient.
    """
    torch.set_num_threads(1)  # more threads would add numbers in another order
    model = model_of(options)
    settings = settings_of(options, model, lr) | {
        "step": StepPolicy(
            post_validation=options.enable_optimizer_post_validation,
            loss_scale=LossScaler() if options.dtype == "fp16" else None,
            offload_optimizer=options.offload_optimizer,
        ),
        "execution": Execution(watch=options.measures_first),
    }
    if options.measures_first:
        plan = plan_model(
            model.layered,
            "auto",
            n_microbatches=plan.schedule.n_microbatches,
            n_stages=plan.schedule.n_stages,
            memory_limit=options.memory_limit,
            example=model.batch(plan.schedule.n_microbatches),
            **settings,
        )
    pipeline = Pipeline(model.layered, plan, clip_grad_norm=clip_grad_norm, **settings)
    return pipeline, model


def settings_of(options: ModelOptions, model: UserModel, lr: float) -> dict[str, Any]:
    """Arguments of a pipeline that follow from the model and how it computes."""
    return {
        "loss_fn": model.loss_fn or output_is_loss,
        "optimizer": partial(make_optimizer, lr),
        "device": asked_device(options.device),
        "numerics": Numerics(autocast=AUTOCAST[options.dtype], seed=options.seed),
    }


def output_is_loss(outputs: Tensor, targets: object) -> Tensor:
    """The loss of a model whose last layer puts it out."""
    return outputs


def make_optimizer(lr: float, parameters: list[nn.Parameter]) -> AdamW:
    """Make the optimizer of a stage."""
    return AdamW(parameters, lr=lr, betas=_BETAS, weight_decay=0.1, fused=True)
