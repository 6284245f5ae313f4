"""Checkpoints without a pipeline: of and into plain models."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.checkpoint.folder import alone, open_newest
from zbpp.checkpoint.model import LocalModel
from zbpp.checkpoint.state import (
    State,
    check_state,
    load_state,
    read_state,
    refuse_misfits,
    state_of,
)

__all__ = ["load", "plain_state", "read_model"]


def load(
    path: str | Path,
    model: nn.Module,
    *,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    schedulers: Sequence[Any] = (),
    own_name: Callable[[str], str] | None = None,
) -> dict[str, Any]:
    """Load a checkpoint of a pipeline into a plain model.

    Args:
        path: a checkpoint, or a folder of them (the newest undamaged one counts).
        model: as a whole; its ``state_dict`` has the names of the checkpoint. Its
            parameters may be DTensors, on any mesh.
        optimizers: to be loaded too; none: the model alone is.
        schedulers: of the optimizers.
        own_name: from a name in ``model`` to one in the checkpoint, if they differ.

    Returns:
        ``step``, ``extra`` as it was given to `save`, and with optimizers ``run``, the
        state of loss scale and post-validation.

    Raises:
        CheckpointError: there is none that is undamaged.
        RequestError: it does not fit; then nothing is changed.
    """
    folder, manifest, _ = open_newest(path)
    model_only = not optimizers
    state, copy = read_state(folder, manifest, model_only=model_only)
    local = _local_model(model, optimizers, schedulers, own_name)
    fit = check_state(local, state, model_only=model_only)
    refuse_misfits(fit, state, alone)
    load_state(local, fit, copy)
    return {name: state[name] for name in ("step", "extra", "run") if name in state}


def plain_state(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    schedulers: Sequence[Any] = (),
    step: int = 0,
    own_name: Callable[[str], str] | None = None,
) -> State:
    """Give the state of a plain training, for `zbpp.Pipeline.load_state_dict`.

    Call it before the model becomes a pipeline. Tensors are not copied.

    Args:
        model: as a whole.
        optimizers: of the model; their state goes by the names of the parameters.
        schedulers: of the optimizers.
        step: number of steps done.
        own_name: from a name in ``model`` to one in the pipeline, if they differ.

    Raises:
        RequestError: an optimizer steps a parameter that is not in the model.
    """
    local = _local_model(model, optimizers, schedulers, own_name)
    return {**state_of(local, step=step, run={}), "run": None}


def _local_model(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    schedulers: Sequence[Any],
    own_name: Callable[[str], str] | None,
) -> LocalModel:
    return LocalModel(
        [(0, model)],
        lambda _, name: own_name(name) if own_name is not None else name,
        optimizers=[optimizers],
        schedulers=schedulers,
    )


def read_model(path: str | Path) -> dict[str, Tensor]:
    """Parameters and buffers of a checkpoint, by the model's own names, tied ones too.

    Args:
        path: a checkpoint, or a folder of them (the newest undamaged one counts).

    Raises:
        CheckpointError: there is none that is undamaged.
    """
    folder, manifest, _ = open_newest(path)
    state, copy = read_state(folder, manifest, model_only=True)
    model = state["model"]
    pairs = {
        name: (x, torch.empty_like(x, device="cpu"))
        for name, x in model.items()
        if isinstance(x, Tensor) and x.is_meta
    }
    copy([*pairs.values()])
    model |= {name: x for name, (_, x) in pairs.items()}
    tied = {alias: name for alias, name in manifest.aliases.items() if name in model}
    return {**model, **{alias: model[name] for alias, name in tied.items()}}
