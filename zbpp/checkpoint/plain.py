"""Checkpoints without a pipeline: into a plain model, or as files of its weights."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.checkpoint.folder import candidates, open_checkpoint
from zbpp.checkpoint.manifest import CheckpointError, Manifest
from zbpp.checkpoint.owned import plainly_owned
from zbpp.checkpoint.state import (
    check_state,
    load_state,
    read_state,
    refuse_misfits,
)

__all__ = ["find", "load", "read_model"]


def find(path: str | Path) -> tuple[Path, Manifest]:
    """A checkpoint, or the newest undamaged one in a folder of them.

    Raises:
        CheckpointError: there is none; names what is damaged.
    """
    wrong = []
    for one in candidates(path):
        try:
            return one, open_checkpoint(one)
        except CheckpointError as error:
            wrong.append(str(error))
    raise CheckpointError("; ".join(wrong))


def read_model(path: str | Path) -> dict[str, Tensor]:
    """Parameters and buffers of a checkpoint, by the model's own names, tied ones too.

    Args:
        path: a checkpoint, or a folder of them.

    Raises:
        CheckpointError: there is none that is undamaged.
    """
    folder, manifest = find(path)
    state = read_state(folder, manifest, None, model_only=True)
    model: dict[str, Any] = state["model"]
    tied = {a: model[name] for a, name in manifest.aliases.items() if name in model}
    return {**model, **tied}


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
        model: as a whole; its ``state_dict`` has the names of the checkpoint.
        optimizers: to be loaded too; none: the model alone is.
        schedulers: of the optimizers.
        own_name: from a name in ``model`` to one in the checkpoint, if they differ.

    Returns:
        ``step``, ``extra`` as it was given to `save`, and ``run``: what else was saved.

    Raises:
        CheckpointError: there is none that is undamaged.
        RequestError: it does not fit; then nothing is changed.
    """
    folder, manifest = find(path)
    owned = plainly_owned(model, optimizers, schedulers, own_name=own_name)
    model_only = not optimizers
    state = read_state(folder, manifest, None, model_only=model_only)
    checked = check_state(owned, state, model_only=model_only)
    given = {part: set(state[part]) for part in checked.used}
    refuse_misfits([checked.told()], given, manifest.aliases)
    load_state(owned, state, checked)
    kept = {name: state.get(name) or {} for name in ("extra", "run")}
    return {"step": state["step"], **kept}
