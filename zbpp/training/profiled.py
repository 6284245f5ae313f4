"""`zbpp profile`: one process's share, and what it writes and prints."""

import json
from dataclasses import replace
from functools import partial

import torch

from zbpp.core import LayerCosts, PassKind, write_costs
from zbpp.diagnostics import profile
from zbpp.memory import layer_memory
from zbpp.planning import Plan
from zbpp.training.options import ProfileOptions
from zbpp.training.setup import AUTOCAST, build_pipeline, make_optimizer, model_of

__all__ = ["run_profile"]


def run_profile(options: ProfileOptions, plan: Plan) -> None:
    """Profile, and let rank 0 write and print."""
    torch.set_num_threads(1)  # as in training: the processes share the cores
    if options.enable_optimizer_post_validation is None and plan.schedule.n_stages > 1:
        # from the first step on, as most steps of a run
        splits = plan.schedule.runs(PassKind.W)
        options = replace(options, enable_optimizer_post_validation=splits)
    model = model_of(options)
    pipeline = build_pipeline(options, plan, model)
    batch = model.batch(pipeline.n_microbatches)
    measured = profile(pipeline, *batch, rounds=options.rounds)
    if pipeline.rank == 0:
        costs = measured.with_memory(_estimated(options))
        write_costs(costs.costs(), options.out)
        names = [str(options.out)]
        if options.layers_out is not None:
            write_costs(costs.layers, options.layers_out)
            names.append(f"{options.layers_out} (per layer)")
        if options.json:
            print(json.dumps(costs.as_dict()), flush=True)
        else:
            print(costs.table)
            print("costs in ms and bytes:", ", ".join(names), flush=True)
    pipeline.close()


def _estimated(options: ProfileOptions) -> LayerCosts:
    """What the layers hold, on fake tensors: some seconds."""
    model = model_of(options)  # the pipeline has released layers of other processes
    return layer_memory(
        model.model,
        (model.inputs, model.targets),
        model.loss_fn,
        n_layers=model.n_layers,
        optimizer=partial(make_optimizer, 0.0),
        autocast=AUTOCAST[options.dtype],
    )
