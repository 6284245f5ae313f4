"""Checks of what `zbpp.Pipeline` is given, before anything is built."""

import math
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zbpp.core import RequestError, Schedule, a_kind
from zbpp.planning import Plan
from zbpp.runtime.optim.loss_scale import LossScaler

__all__ = ["check_arguments", "check_first_step", "checked_device", "warn_of_plan"]

_LONGEST_S = 1e9
"""30 years; torch counts time-outs in whole units of 64 bits."""


def check_arguments(
    *,
    loss_fn: Any,
    counts: Mapping[str, Any],
    times_s: Mapping[str, Any],
    schedule: Any,
    clip_grad_norm: Any,
    autocast: Any,
    loss_scale: Any,
    seed: Any,
) -> None:
    """Refuse values that would end in an error from inside, or in a wrong training.

    Args:
        loss_fn: the user's; None: the model's.
        counts: by name, each a whole number from 1 on, or None.
        times_s: by name, in seconds; None: chosen later.
        schedule: a mode, a file, a schedule or a plan.
        clip_grad_norm: as `zbpp.Pipeline` takes it, as the arguments below.
        autocast: likewise.
        loss_scale: likewise.
        seed: likewise.

    Raises:
        RequestError: names the argument, its value, and what it may be.
    """
    _check_loss(loss_fn)
    for name, count in counts.items():
        if count is not None and not (_is_whole(count) and count >= 1):
            raise RequestError(f"{name} is {count!r}; give a whole number from 1 on")
    for name, time_s in times_s.items():
        if time_s is not None and not (_is_number(time_s) and 0 < time_s <= _LONGEST_S):
            raise RequestError(
                f"{name} is {time_s!r}; give seconds, above 0 and up to {_LONGEST_S:g}"
            )
    if not isinstance(schedule, str | Path | Schedule | Plan):
        raise RequestError(
            f"schedule is {a_kind(schedule)}; give the name of a mode such as 'ZBH1', "
            "a schedule file, a zbpp.Schedule or a zbpp.Plan"
        )
    if clip_grad_norm is not None and not (
        _is_number(clip_grad_norm) and clip_grad_norm > 0
    ):
        raise RequestError(
            f"clip_grad_norm is {clip_grad_norm!r}; give the largest norm, a number "
            "above 0, or None to clip nothing"
        )
    _check_autocast(autocast, loss_scale)
    if seed is not None and not _is_whole(seed):
        raise RequestError(f"seed is {seed!r}; give a whole number, or None")


def checked_device(device: Any) -> torch.device:
    """The device of a name.

    Raises:
        RequestError: torch knows no such device.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise RequestError(
            f"device is {device!r}; give one that torch.device takes, such as 'cpu' "
            "or 'cuda:0', or leave it out"
        ) from None


def warn_of_plan(
    schedule: Schedule, request: Any, *, n_stages: int | None, n_ranks: int
) -> None:
    """Warn of a mode that runs on one stage because nobody has said how many.

    Args:
        schedule: that was planned.
        request: the mode, file or schedule that was asked for.
        n_stages: that were asked for.
        n_ranks: processes that step together.
    """
    is_mode = not isinstance(request, Schedule | Plan)
    if is_mode and n_stages is None and schedule.n_stages == 1 and n_ranks == 1:
        warnings.warn(
            "this process is alone and n_stages is left out, so the pipeline has one "
            "stage: start a process a stage by torchrun --nproc-per-node N, or give "
            "n_stages (1, if one is meant)",
            stacklevel=3,
        )


def _check_loss(loss_fn: Any) -> None:
    if loss_fn is None:
        return
    if not callable(loss_fn) or isinstance(loss_fn, type):
        what = loss_fn.__name__ if isinstance(loss_fn, type) else repr(loss_fn)
        raise RequestError(
            f"loss_fn is {what}; give a function of (outputs, targets), for instance "
            "torch.nn.functional.mse_loss or torch.nn.MSELoss()"
        )
    bound = loss_fn.keywords if isinstance(loss_fn, partial) else {}
    reduction = bound.get("reduction", getattr(loss_fn, "reduction", "mean"))
    if reduction in ("sum", "none"):
        raise RequestError(
            f"loss_fn has reduction={reduction!r}; the loss of the batch is the mean "
            "over micro-batches, so give reduction='mean', and scale what it returns "
            "if a sum is meant"
        )


def _check_autocast(autocast: Any, loss_scale: Any) -> None:
    if autocast is not None and not (
        isinstance(autocast, torch.dtype) and autocast.is_floating_point
    ):
        raise RequestError(
            f"autocast is {autocast!r}; give a dtype, torch.bfloat16 or torch.float16, "
            "or None"
        )
    is_scale = _is_number(loss_scale) or isinstance(loss_scale, LossScaler)
    if loss_scale is not None and not is_scale:
        raise RequestError(
            f"loss_scale is {a_kind(loss_scale)}; give a number or a "
            "zbpp.runtime.LossScaler, which does what torch.amp.GradScaler does"
        )
    if autocast is torch.float16 and loss_scale is None:
        warnings.warn(
            "autocast is torch.float16 without a loss_scale: small gradients become 0; "
            "give loss_scale=zbpp.runtime.LossScaler(), or autocast=torch.bfloat16",
            stacklevel=4,
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and not math.isnan(value)


def check_first_step(first_step: int) -> int:
    """Return a step's number if it can be one.

    Raises:
        RequestError: it is not a whole number from 0 on.
    """
    if not isinstance(first_step, int) or first_step < 0:
        raise RequestError(
            f"first_step is {first_step!r}; give the number of steps done before, from "
            "0 on (pipeline.n_steps when the state was saved)"
        )
    return first_step
