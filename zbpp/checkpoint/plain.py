"""Checkpoints without a pipeline: of and into plain models."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.checkpoint.folder import alone, open_newest
from zbpp.checkpoint.local import (
    LocalModel,
    Pairs,
    State,
    allocate,
    compare,
    local_state,
)
from zbpp.checkpoint.state import read_state, refuse_misfits


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
    loading = compare(local, state, model_only=model_only)
    refuse_misfits(loading, state, alone)
    loading.run(copy)
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
    return {**local_state(local), "step": step, "run": None}


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
    """Parameters and buffers of a checkpoint, by the model's names, tied ones too.

    Args:
        path: a checkpoint, or a folder of them (the newest undamaged one counts).

    Raises:
        CheckpointError: there is none that is undamaged.
    """
    folder, manifest, _ = open_newest(path)
    state, copy = read_state(folder, manifest, model_only=True)
    pairs = Pairs()
    model: dict[str, Any] = allocate(state["model"], pairs)
    copy(pairs)
    aliases = state["aliases"].items()
    return model | {alias: model[name] for alias, name in aliases if name in model}
