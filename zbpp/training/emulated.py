"""`zbpp train --emulate`: one process's share, and what it prints."""

import json
from dataclasses import replace

import torch.distributed as dist

from zbpp.core import Schedule
from zbpp.emulation.run import emulate
from zbpp.training.options import Train
from zbpp.training.setup import costs_of
from zbpp.training.splits import sleeping_layers

__all__ = ["run_emulated"]


def run_emulated(options: Train, schedule: Schedule) -> None:
    """Run one process's share of ``zbpp train --emulate``; rank 0 prints the outcome.

    One step at a time, unless a flag asks for post-validation or a barrier. With
    ``--metrics``, the outcome is also written as one JSON line.
    """
    layers = sleeping_layers(options)
    outcome = emulate(
        schedule,
        None if layers else costs_of(replace(options, layers=None), schedule),
        layers=layers,
        n_steps=options.steps or 1,
        timeout_s=options.timeout_s,
        post_validation=options.enable_optimizer_post_validation,
    )
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    print(outcome, flush=True)
    if options.metrics is not None:
        options.metrics.write_text(json.dumps(outcome.as_dict()) + "\n")
