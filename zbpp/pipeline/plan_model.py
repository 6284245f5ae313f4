"""Plan for a model before its pipeline exists; measure its layers on request."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from zbpp.core import Schedule
from zbpp.core.replicas import reduces_every
from zbpp.memory import layer_memory
from zbpp.models import layered_of
from zbpp.models.entry import AnyModel
from zbpp.pipeline.arguments import Processes, device_of, join, loss_of
from zbpp.pipeline.pipeline import Pipeline
from zbpp.planning import Plan, PlanRequest
from zbpp.planning.make import plan_pipeline
from zbpp.planning.request import (
    CostsLike,
    MemoryLimit,
    Recomputing,
    Split,
    costs_like,
)
from zbpp.runtime.comm.place import TENSOR_DIM
from zbpp.runtime.loss import LossFn
from zbpp.runtime.optim.make import MakeOptimizer
from zbpp.runtime.policies import Execution, Numerics, StepPolicy
from zbpp.tuning import measure_layers


def plan_model(
    model: AnyModel,
    schedule: str | Path | Schedule | Plan = "auto",
    *,
    n_stages: int | None = None,
    n_microbatches: int | None = None,
    costs: CostsLike | None = None,
    example: Any = None,
    memory_limit: MemoryLimit | None = None,
    split: Split = None,
    recompute: Recomputing | None = None,
    mesh: Processes | None = None,
    device: torch.device | str | None = None,
    optimizer: MakeOptimizer | None = None,
    loss_fn: LossFn | None = None,
    numerics: Numerics = Numerics(),
    step: StepPolicy = StepPolicy(),
    execution: Execution = Execution(),
) -> Plan:
    """Plan a schedule and a split for a model; `zbpp.Pipeline` runs the plan.

    Without costs only the orders are chosen, and layers are divided evenly.

    Args:
        model: as `zbpp.Pipeline` takes it.
        schedule: a mode such as ``"auto"``, a schedule or plan file, a `Schedule`, or a
            `Plan`.
        n_stages: number of stages; None: the schedule's, or one per process.
        n_microbatches: micro-batches in a step; None: the schedule's.
        costs: of the chunks or of the layers, or a file of them.
        example: inputs and targets of a step, on every rank, in place of costs: the
            layers are then measured on the devices of the pipeline, and their memory is
            estimated; every rank must call.
        memory_limit: of a stage: a text such as ``"16GiB"``, a number in the unit of
            the costs, or a list with one entry a stage.
        split: layers of each chunk, or ``"even"``: the outer chunks get one more, or
            ``"balanced"``: by the costs of layers. None: the schedule's; if it has
            none, balanced with costs of layers, else even.
        recompute: layers that B computes again, for memory: ``"auto"`` (by costs with
            m_r, and a limit), ``"all"``, ``"none"``, numbers. None: the schedule's.
        mesh: processes of the pipeline, as for `zbpp.Pipeline`.
        device: of this process, as for `zbpp.Pipeline`.
        optimizer: with ``example``, the optimizer of the later `zbpp.Pipeline`.
        loss_fn: the same of the loss.
        numerics: the same of `zbpp.Numerics`.
        step: the same of when the optimizer steps.
        execution: the same of how passes are executed.

    Raises:
        RequestError: the model, the costs and the request do not fit together.
        PeerError: another process died or did not answer while measuring.
    """
    device = device_of(device)
    place, replicas = join(
        mesh,
        device=device,
        n_stages=n_stages,
        timeout_s=execution.start_timeout_s,
    )
    layered = layered_of(model)
    request = PlanRequest(
        schedule=schedule,
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        memory_limit=cast(Any, memory_limit),
        split=split,
        recompute=recompute,
    )
    if example is not None and costs is None:
        loss_fn = loss_of(layered, loss_fn)
        build = partial(
            Pipeline,
            replace(layered, parts={}),  # nothing is trained: all keep their weights
            optimizer=optimizer,
            loss_fn=loss_fn,
            n_stages=n_stages,
            n_microbatches=n_microbatches,
            mesh=replicas.mesh,
            device=device,
            numerics=numerics,
            step=StepPolicy(  # validated from the first step on, as most steps of a run
                post_validation=step.post_validation is not False
                and optimizer is not None
                and (n_stages or place.n_stages) > 1,
                max_consecutive_skips=None,
                offload_optimizer=step.offload_optimizer,
            ),
            execution=replace(execution, watch=False),
        )
        estimate = partial(
            layer_memory,
            layered,
            loss_fn=loss_fn,
            device=device,
            optimizer=optimizer,
            post_validation=step.post_validation is not False,
            autocast=numerics.autocast,
            exact_sums=numerics.exact_sums,
            offload_optimizer=step.offload_optimizer,
        )
        if not isinstance(example, tuple) and layered.cut_batch is not None:
            example = layered.cut_batch(example)
        costs = measure_layers(
            build, model, example,
            device=device, estimate=estimate,
            overlaps=execution.overlap and not reduces_every(replicas.shard),
        )  # fmt: skip
        if execution.partition_activations:
            n = place.sizes[TENSOR_DIM]
            costs = replace(costs, m_r=tuple(x / n for x in costs.of("m_r")))
    request = replace(request, costs=costs_like(costs))
    return plan_pipeline(request, n_layers=layered.n_layers, n_ranks=place.n_stages)
