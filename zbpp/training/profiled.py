"""`zbpp profile`: one process's share, and what it writes and prints."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from zbpp.core import PassKind, write_costs
from zbpp.diagnostics import profile
from zbpp.planning import Plan
from zbpp.training.options import RunOptions
from zbpp.training.setup import build_pipeline, estimate_layers, model_of

__all__ = ["run_profile"]


def run_profile(
    options: RunOptions,
    plan: Plan,
    *,
    out: Path,
    layers_out: Path | None,
    rounds: int,
    as_json: bool,
) -> None:
    """Profile, and let rank 0 write and print.

    Args:
        options: of the run whose passes are timed.
        plan: of the run.
        out: costs file to write.
        layers_out: layers file to write.
        rounds: passes that are counted.
        as_json: print a JSON object, and no table.
    """
    torch.set_num_threads(1)  # as in training: the processes share the cores
    if options.enable_optimizer_post_validation is None and plan.schedule.n_stages > 1:
        # from the first step on, as most steps of a run
        splits = plan.schedule.runs(PassKind.W)
        options = replace(options, enable_optimizer_post_validation=splits)
    model = model_of(options)
    pipeline = build_pipeline(options, plan, model)
    batch = model.batch(pipeline.n_microbatches)
    measured = profile(pipeline, *batch, rounds=rounds)
    if pipeline.rank == 0:
        # another copy: the pipeline has released the layers of other processes
        measured = measured.with_memory(estimate_layers(options, model_of(options)))
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
