"""The ``profile`` command: measure a costs file on the real devices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from cyclopts import Parameter

from zbpp.core import PassKind, write_costs
from zbpp.planning import Plan
from zbpp.training.options import Count, Output, RunOptions


@dataclass(frozen=True, kw_only=True)
class Profile(RunOptions):
    """Measure a model's costs, per chunk and per layer, on the real devices.

    F, B, W, the loss, O, V, links and memory, from some steps, then from each layer
    alone; of the model of zbpp train, or of yours. Starts its processes, or
    runs as one of torchrun's.
    """

    out: Annotated[Output, Parameter(alias="-o")]
    """Costs file to write: ms and bytes, one entry per chunk."""
    layers_out: Output | None = None
    """Also write the costs of each layer, to plan the split with."""
    rounds: Count = 8
    """Steps, and runs of each layer alone, that count after a warm-up."""

    def run(self, words: Sequence[str]) -> None:
        """Profile, and return when it is done."""
        from zbpp.training.launch import start
        from zbpp.training.setup import plan_of

        start(_profile, self, words, plan=plan_of)


def _profile(options: Profile, plan: Plan) -> None:
    """Profile as one process, and let rank 0 write and print."""
    from zbpp.diagnostics import profile
    from zbpp.memory import layer_memory
    from zbpp.training.setup import AUTOCAST, build_pipeline, make_optimizer, model_of

    if options.enable_optimizer_post_validation is None and plan.n_stages > 1:
        # from the first step on, as most steps of a run
        splits = plan.schedule.runs(PassKind.W)
        options = replace(options, enable_optimizer_post_validation=splits)
    pipeline, model = build_pipeline(options, plan)
    batch = model.batch(pipeline.n_microbatches)
    measured = profile(pipeline, *batch, rounds=options.rounds)
    if pipeline.rank == 0:
        model = model_of(options)  # the pipeline released layers of other processes
        memory = layer_memory(  # on fake tensors: some seconds
            model.layered,
            (model.inputs, model.targets),
            model.loss_fn,
            optimizer=partial(make_optimizer, 0.0),
            autocast=AUTOCAST[options.dtype],
        )
        layers = measured.layers.with_memory_of(memory)
        costs = replace(measured, layers=layers)
        write_costs(costs.costs(), options.out)
        names = [str(options.out)]
        if options.layers_out is not None:
            write_costs(layers, options.layers_out)
            names.append(f"{options.layers_out} (per layer)")
        print(costs.table)
        print("costs in ms and bytes:", ", ".join(names), flush=True)
    pipeline.close()
