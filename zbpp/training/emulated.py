"""`zbpp train --emulate`: one process's share, and what it prints."""

import json

import torch.distributed as dist

from zbpp.core import Schedule
from zbpp.emulation.run import emulate
from zbpp.training.options import Train
from zbpp.training.setup import costs_of

__all__ = ["run_emulated"]


def run_emulated(options: Train, schedule: Schedule) -> None:
    """Run one process's share of ``zbpp train --emulate``; rank 0 prints the outcome.

    One step at a time, unless a flag asks for post-validation or a barrier. With
    ``--metrics``, the outcome is also written as one JSON line.
    """
    costs, _ = costs_of(options)
    outcome = emulate(
        schedule,
        costs,
        n_steps=options.steps or 1,
        timeout_s=options.timeout_s,
        post_validation=options.enable_optimizer_post_validation,
    )
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    print(outcome, flush=True)
    if options.metrics is not None:
        options.metrics.write_text(json.dumps(outcome.as_dict()) + "\n")
