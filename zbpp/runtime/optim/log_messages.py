"""Lines that a run says of its optimizer steps, by the logger ``zbpp``."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from zbpp.runtime.optim.param_groups import parameters_of
from zbpp.runtime.optim.patience import Patience

__all__ = [
    "warn_barrier_fallback",
    "warn_snapshot_cost",
    "warn_unstepped",
]

_log = logging.getLogger("zbpp")


def warn_snapshot_cost(optimizer: torch.optim.Optimizer) -> None:
    """Speculative steps of this optimizer copy everything, in every step."""
    held = parameters_of(optimizer)
    held += [
        value
        for state in optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    _log.warning(
        "post-validation: %s can only be rolled back by a copy of its whole state "
        "(%.1f MiB now on stage 0), made in every step; "
        "--no-enable_optimizer_post_validation (post_validation=False) does without",
        type(optimizer).__name__,
        sum(tensor.nbytes for tensor in held) / 2**20,
    )


def warn_barrier_fallback(patience: Patience) -> None:
    """The barrier is back."""
    _log.warning(
        "post-validation: %d of the last %d steps had to be rolled back, so the "
        "optimizer now waits for the norm, until %d steps in a row need no correction",
        patience.failures,
        patience.window,
        patience.clean,
    )


def warn_unstepped(names: Sequence[str]) -> None:
    """Parameters with gradients that no optimizer of their stage steps."""
    _log.warning(
        "%d parameter(s) have gradients, but no optimizer steps them (%s%s): their "
        "gradients are cleared, and do not count in the norm; if that is not meant, "
        "let the optimizer's builder take all the parameters that it is called with",
        len(names),
        ", ".join(names[:5]),
        ", ..." if len(names) > 5 else "",
    )
