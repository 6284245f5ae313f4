"""`zbpp profile`: one process's share, and what it writes and prints."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zbpp.core import write_costs, write_layers
from zbpp.emulation.run import emulated_batch, emulated_pipeline
from zbpp.planning import Plan
from zbpp.planning.replicas import network_of, on_replicas
from zbpp.profiling import Profile
from zbpp.training.options import Train
from zbpp.training.setup import (
    build_pipeline,
    costs_of,
    estimate_layers,
    random_batch,
)
from zbpp.training.user_model import UserModel

__all__ = ["run_profile"]


def run_profile(
    options: Train,
    plan: Plan,
    *,
    load: Callable[[], UserModel] | None,
    out: Path,
    layers_out: Path | None,
    rounds: int,
    as_json: bool,
) -> None:
    """Profile, and let rank 0 write and print.

    Args:
        options: of the run whose passes are timed.
        plan: of the run.
        load: gives a user's model; None: that of `zbpp train`.
        out: costs file to write.
        layers_out: layers file to write.
        rounds: passes that are counted.
        as_json: print a JSON object, and no table.
    """
    torch.set_num_threads(1)  # as in training: the processes share the cores
    emulated = options.emulate is not None
    loaded = None if load is None else load()
    if emulated:
        costs = costs_of(options)
        pipeline = emulated_pipeline(plan.schedule, costs, timeout_s=options.timeout_s)
        inputs: Any = emulated_batch(pipeline)
        targets: Any = inputs
    else:
        pipeline = build_pipeline(replace(options, shard="none"), plan, loaded)
        m = pipeline.n_microbatches
        if loaded is None:
            inputs, targets = random_batch(options, m)
        else:
            inputs = [loaded.inputs] * m
            targets = [loaded.targets if loaded.loss_fn else torch.zeros(1)] * m
    profile = pipeline.profile(
        inputs, targets, rounds=rounds, memory=not emulated, shard=options.shard
    )
    if pipeline.rank == 0:
        if not emulated:
            profile = profile.with_memory(estimate_layers(options, loaded))
        write_costs(_of_replica(profile, options.data_parallel).costs(), out)
        if layers_out is not None:
            write_layers(profile.layers, layers_out)
        if as_json:
            print(json.dumps(profile.as_dict()), flush=True)
        else:
            print(profile.table)
            per_layer = [] if layers_out is None else [f"{layers_out} (per layer)"]
            print(
                "costs in ms and bytes:", ", ".join([str(out), *per_layer]), flush=True
            )
    pipeline.close()


def _of_replica(profile: Profile, n: int) -> Profile:
    """Return a profile with memory and optimizer step of replicas that share."""
    network = network_of(profile.layers)
    if n == 1 or profile.shard == "none" or network is None:
        return profile
    whole = replace(profile.layers, parts=None)  # its times are not asked for
    shared = on_replicas(whole, n, network, profile.shard)
    layers = replace(profile.layers, m_fixed=shared.m_fixed, optimizer=shared.optimizer)
    return replace(profile, layers=layers)
