"""Checks of the arguments of `zbpp.Pipeline`; policies check their fields."""

import warnings
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from zbpp.core import RequestError, Schedule
from zbpp.models import Layered
from zbpp.planning import Plan
from zbpp.runtime.comm.place import Place
from zbpp.runtime.comm.process_group import initialise
from zbpp.runtime.loss import LossFn, is_sum, loss_modules
from zbpp.runtime.microbatches import Weigh, WeighName
from zbpp.runtime.parallel.mesh import find_place
from zbpp.runtime.policies import (
    DataParallel,
    Execution,
    Numerics,
    StepPolicy,
    check_count,
    is_number,
)
from zbpp.runtime.support.devices import own_device

Processes = DeviceMesh | DataParallel
"""The processes of a pipeline: a mesh, one with replicas that share, or a group of
stages alone."""


def check_arguments(
    *,
    loss_fn: Any,
    n_stages: Any,
    n_microbatches: Any,
    clip_grad_norm: Any,
    numerics: Numerics,
    step: StepPolicy,
    execution: Execution,
) -> None:
    """Refuse values that would end in an error from inside, or in a wrong training."""
    _check_loss(loss_fn)
    check_count("n_microbatches", n_microbatches)
    check_count("n_stages", n_stages)
    may_clip = is_number(clip_grad_norm) and clip_grad_norm > 0
    if clip_grad_norm is not None and not may_clip:
        raise RequestError(
            f"clip_grad_norm is {clip_grad_norm!r}; give the largest norm, a number "
            "above 0, or None to clip nothing"
        )
    if execution.compile not in ("blocks", True, False):
        raise RequestError(
            f'compile is {execution.compile!r}; it must be "blocks" or False'
        )
    if numerics.autocast is torch.float16 and step.loss_scale is None:
        warnings.warn(
            "autocast is torch.float16 without a loss_scale: small gradients become 0; "
            "give step=zbpp.StepPolicy(loss_scale=zbpp.runtime.LossScaler()), or "
            "autocast=torch.bfloat16",
            stacklevel=4,
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
    if bound.get("reduction", getattr(loss_fn, "reduction", "mean")) == "none":
        raise RequestError(
            "loss_fn has reduction='none'; it must return one number: give "
            "reduction='mean' or 'sum'"
        )
    for module in loss_modules(loss_fn):
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        if trained:
            raise RequestError(
                f"loss_fn has parameters to train ({', '.join(trained[:3])}), which no "
                "stage steps or saves; compute with them in the last layer, or freeze "
                "them (requires_grad_(False))"
            )


def weigh_of(
    loss_fn: LossFn, weigh: WeighName | Weigh | None, default: WeighName | Weigh
) -> WeighName | Weigh:
    """Return the unit of the mean over the batch, or ``"sum"``."""
    if not is_sum(loss_fn):
        return weigh or default
    if weigh not in (None, "sum"):
        raise RequestError(
            f"loss_fn has reduction='sum', and weigh is {weigh!r}, which is for means; "
            "leave weigh out for the sum over the batch, or give reduction='mean'"
        )
    return "sum"


def loss_of(layered: Layered, loss_fn: LossFn | None) -> LossFn:
    """Return the caller's loss, or the model's; refuse a model without either."""
    loss_fn = loss_fn or layered.loss_fn
    if loss_fn is None:
        raise RequestError(
            "the model has no loss; give loss_fn, the mean over one "
            "micro-batch of (outputs, targets)"
        )
    return loss_fn


def device_of(device: torch.device | str | None) -> torch.device:
    """Return this process's device."""
    try:
        return own_device(device)
    except (RuntimeError, TypeError):
        raise RequestError(
            f"device is {device!r}; give a device that torch.device accepts, such as "
            "'cpu' or 'cuda:0', or leave it out"
        ) from None


def join(
    mesh: Processes | None,
    *,
    device: torch.device,
    n_stages: int | None,
    timeout_s: float,
) -> tuple[Place, DataParallel]:
    """Find the processes of a pipeline, and how their replicas share.

    Where torchrun's variables ask for a process group and there is none yet, this
    process joins it.
    """
    initialise(device, timeout_s=timeout_s)
    replicas = mesh if isinstance(mesh, DataParallel) else DataParallel(mesh=mesh)
    if not isinstance(replicas.mesh, DeviceMesh | None):
        raise RequestError(
            f"mesh is {replicas.mesh!r:.60}; give zbpp.mesh(stages=..), another "
            "DeviceMesh (from a process group: DeviceMesh.from_group(group, "
            "device_type, mesh_dim_names=('pp',))), or zbpp.DataParallel(mesh=..)"
        )
    return find_place(replicas.mesh, device, n_stages=n_stages), replicas


def warn_of_plan(
    schedule: Schedule, request: object, *, n_stages: int | None, n_ranks: int
) -> None:
    """Warn of a mode that runs on one stage because the caller left n_stages out."""
    is_mode = not isinstance(request, Schedule | Plan)
    if is_mode and n_stages is None and schedule.n_stages == 1 and n_ranks == 1:
        warnings.warn(
            "this process is alone and n_stages is left out, so the pipeline has one "
            "stage: start a process a stage by torchrun --nproc-per-node N, or give "
            "n_stages (1 for a single stage)",
            stacklevel=4,
        )
