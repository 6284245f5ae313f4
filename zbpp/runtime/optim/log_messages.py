"""What a run says of its early steps, by the logger ``zbpp``."""

import logging

import torch
from torch import Tensor

from zbpp.runtime.optim.param_groups import parameters_of
from zbpp.runtime.optim.patience import Patience

__all__ = [
    "log_not_compiled",
    "warn_barrier_fallback",
    "warn_snapshot_cost",
]

_log = logging.getLogger("zbpp")


def warn_snapshot_cost(optimizer: torch.optim.Optimizer) -> None:
    """Early steps of this optimizer need a copy of everything, in every step."""
    held = parameters_of(optimizer)
    held += [
        value
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    _log.warning(
        "post-validation: %s can only be taken back by a copy of its whole state "
        "(%.1f MiB now on stage 0), made in every step; "
        "--no-enable_optimizer_post_validation (post_validation=False) does without",
        type(optimizer).__name__,
        sum(tensor.nbytes for tensor in held) / 2**20,
    )


def warn_barrier_fallback(patience: Patience) -> None:
    """The barrier is back."""
    _log.warning(
        "post-validation: %d of the last %d steps had to be taken back, so the "
        "optimizer now waits for the norm, until %d steps in a row need no correction",
        patience.failures,
        patience.window,
        patience.clean,
    )


def log_not_compiled(reason: Exception) -> None:
    """Early steps copy the optimizer state, a little at a time."""
    _log.info(
        "post-validation: early steps take about half as long again as plain ones: %s",
        reason,
    )
