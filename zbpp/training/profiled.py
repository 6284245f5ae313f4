"""`zbpp profile`: one process's share, and what it writes and prints."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from zbpp.core import LayerCosts, Schedule, write_costs, write_layers
from zbpp.emulation.run import emulated_batch, emulated_pipeline
from zbpp.memory import layer_memory
from zbpp.models import layered_of
from zbpp.pipeline import Pipeline
from zbpp.planning import Plan
from zbpp.planning.replicas import network_of, on_replicas
from zbpp.profiling import Profile
from zbpp.runtime.policies import Execution, StepPolicy
from zbpp.training.build import (
    build_pipeline,
    estimate_layers,
    mesh_of,
    numerics_of,
    tracing_of,
)
from zbpp.training.options import Train
from zbpp.training.setup import costs_of, device_of
from zbpp.training.user_model import UserModel

__all__ = ["ProfileRequest", "run_profile"]


@dataclass(frozen=True)
class ProfileRequest:
    """Options of a profile: the model, and where the results go.

    ``load`` gives a user's model; None: the model of `zbpp train`.
    """

    load: Callable[[], UserModel] | None
    out: Path
    layers_out: Path | None
    rounds: int
    json: bool


def run_profile(request: ProfileRequest, options: Train, plan: Plan) -> None:
    """Profile, and let rank 0 write and print.

    Raises:
        RequestError: the model and the schedule do not fit together.
    """
    torch.set_num_threads(1)  # as in training: the processes share the cores
    emulated = options.emulate is not None
    loaded = None if request.load is None else request.load()
    if emulated:
        costs = costs_of(options)
        pipeline = emulated_pipeline(plan.schedule, costs, timeout_s=options.timeout_s)
        inputs: Any = emulated_batch(pipeline)
        targets: Any = inputs
    elif loaded is not None:
        pipeline = _pipeline_of(loaded, options, plan.schedule)
        m = pipeline.n_microbatches
        inputs = [loaded.inputs] * m
        targets = [loaded.targets if loaded.loss_fn else torch.zeros(1)] * m
    else:
        pipeline = build_pipeline(replace(options, shard="none"), plan)
        inputs = targets = _tokens(options, pipeline.n_microbatches)
    profile = pipeline.profile(
        inputs,
        targets,
        rounds=request.rounds,
        memory=not emulated,
        shard=options.shard,
    )
    if pipeline.rank == 0:
        if not emulated:
            profile = profile.with_memory(_estimate(loaded, options))
        _write(profile, request, options.data_parallel)
    pipeline.close()


def _pipeline_of(loaded: UserModel, options: Train, schedule: Schedule) -> Pipeline:
    return Pipeline(
        layered_of(loaded.model, loaded.n_layers),
        schedule,
        loss_fn=loaded.loss_fn or _own_loss,
        optimizer=partial(_adamw, options.lr),
        mesh=mesh_of(options, schedule.n_stages),
        device=device_of(options),
        numerics=numerics_of(options),
        step=StepPolicy(
            post_validation=options.enable_optimizer_post_validation,
        ),
        execution=Execution(
            compile="blocks" if options.compiles else False,
            timeout_s=options.timeout_s,
        ),
    )


def _own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The last layer has put it out."""
    return outputs


def _adamw(lr: float, parameters: list[torch.nn.Parameter]) -> AdamW:
    return AdamW(parameters, lr=lr, fused=True)


def _tokens(options: Train, n_microbatches: int) -> Tensor:
    shape = (n_microbatches * options.microbatch_size, options.seq)
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0))


def _estimate(loaded: UserModel | None, options: Train) -> LayerCosts:
    """Bytes of the layers, on fake tensors."""
    if loaded is None:
        return estimate_layers(options)
    return layer_memory(
        loaded.model,
        (loaded.inputs, loaded.targets),
        loaded.loss_fn,
        optimizer=partial(_adamw, options.lr),
        **tracing_of(options, loaded.n_layers if callable(loaded.model) else None),
    )


def _write(profile: Profile, request: ProfileRequest, n_replicas: int) -> None:
    write_costs(_of_replica(profile, n_replicas).costs(), request.out)
    if request.layers_out is not None:
        write_layers(profile.layers, request.layers_out)
    if request.json:
        print(json.dumps(profile.as_dict()), flush=True)
        return
    print(profile.table)
    told = [str(request.out)]
    if request.layers_out is not None:
        told.append(f"{request.layers_out} (per layer)")
    print("costs in ms and bytes:", ", ".join(told), flush=True)


def _of_replica(profile: Profile, n: int) -> Profile:
    """The same with the memory and the optimizer step of replicas that share."""
    network = network_of(profile.layers)
    if n == 1 or profile.shard == "none" or network is None:
        return profile
    whole = replace(profile.layers, parts=None)  # its times are not asked for
    shared = on_replicas(whole, n, network, profile.shard)
    layers = replace(profile.layers, m_fixed=shared.m_fixed, optimizer=shared.optimizer)
    return replace(profile, layers=layers)
