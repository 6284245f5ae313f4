"""`zbpp profile`: one process's share, and what it writes and prints."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from zbpp.core import PassKind, write_costs
from zbpp.diagnostics import profile
from zbpp.planning import Plan
from zbpp.training.options import TrainOptions
from zbpp.training.setup import (
    build_pipeline,
    estimate_layers,
    random_batch,
)
from zbpp.training.user_model import UserModel

__all__ = ["run_profile"]


def run_profile(
    options: TrainOptions,
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
    loaded = None if load is None else load()
    if options.enable_optimizer_post_validation is None and plan.schedule.n_stages > 1:
        # from the first step on, as most steps of a run
        splits = plan.schedule.runs(PassKind.W)
        options = replace(options, enable_optimizer_post_validation=splits)
    pipeline = build_pipeline(options, plan, loaded)
    m = pipeline.n_microbatches
    if loaded is None:
        inputs, targets = random_batch(options, m)
    else:
        inputs = [loaded.inputs] * m
        targets = [loaded.targets if loaded.loss_fn else torch.zeros(1)] * m
    measured = profile(pipeline, inputs, targets, rounds=rounds)
    if pipeline.rank == 0:
        # another copy: the pipeline has released the layers of other processes
        memory = estimate_layers(options, None if load is None else load())
        measured = measured.with_memory(memory)
        write_costs(measured.costs(), out)
        if layers_out is not None:
            write_costs(measured.layers, layers_out)
        if as_json:
            print(json.dumps(measured.as_dict()), flush=True)
        else:
            print(measured.table)
            per_layer = [] if layers_out is None else [f"{layers_out} (per layer)"]
            print(
                "costs in ms and bytes:", ", ".join([str(out), *per_layer]), flush=True
            )
    pipeline.close()
