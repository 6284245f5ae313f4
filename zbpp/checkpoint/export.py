"""Checkpoints without a pipeline: of and into plain models, and for other programs.

    model.safetensors                        one file, or several and an index:
    model-00001-of-00003.safetensors, ..., model.safetensors.index.json

    adapter_model.safetensors, adapter_config.json

The first are the names that `transformers` looks for, so a folder with a
``config.json`` beside them is one for its ``from_pretrained``; the others are those of
`peft`. Tied weights are there once.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zbpp.checkpoint.folder import alone, open_newest
from zbpp.checkpoint.manifest import CheckpointError, write_durably
from zbpp.checkpoint.model import LocalModel
from zbpp.checkpoint.state import (
    State,
    check_state,
    load_state,
    read_state,
    refuse_misfits,
    state_of,
)
from zbpp.checkpoint.tensors import write_tensors

__all__ = [
    "AdapterConfig",
    "export_adapter",
    "export_safetensors",
    "load",
    "plain_state",
    "read_model",
]

_FORMAT = {"format": "pt"}  # transformers asks for it


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
    folder, manifest, _ = open_newest(path)
    local = _local_model(model, optimizers, schedulers, own_name)
    model_only = not optimizers
    state = read_state(folder, manifest, None, model_only=model_only)
    checked = check_state(local, state, model_only=model_only)
    refuse_misfits(checked, state, manifest.aliases, alone)
    load_state(checked)
    rest = {name: state.get(name) or {} for name in ("extra", "run")}
    return {"step": state["step"], **rest}


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
    model, aliases = _read(path)
    tied = {alias: model[name] for alias, name in aliases.items() if name in model}
    return {**model, **tied}


def _read(path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    folder, manifest, _ = open_newest(path)
    state = read_state(folder, manifest, None, model_only=True)
    return state["model"], state["aliases"]


def export_safetensors(
    path: str | Path, out: str | Path, *, max_bytes: int = 5 * 2**30
) -> list[Path]:
    """Write parameters and persistent buffers of a checkpoint for other programs.

    Args:
        path: a checkpoint, or a folder of them (the newest undamaged one counts).
        out: a folder, made if it is not there.
        max_bytes: of the tensors in one file; more go into several, with an index.

    Returns:
        The files, the index last if there is one.

    Raises:
        CheckpointError: there is no checkpoint that is undamaged.
    """
    model, _ = _read(path)
    parts: list[dict[str, Tensor]] = [{}]
    n_bytes = n_bytes_in_part = 0
    for name, tensor in model.items():
        if not isinstance(tensor, Tensor):  # an extra state of a module
            continue
        if parts[-1] and n_bytes_in_part + tensor.nbytes > max_bytes:
            parts.append({})
            n_bytes_in_part = 0
        parts[-1][name] = tensor
        n_bytes_in_part += tensor.nbytes
        n_bytes += tensor.nbytes
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    if len(parts) == 1:
        file = out / "model.safetensors"
        write_tensors(file, parts[0], _FORMAT)
        return [file]
    files, weight_map = [], dict[str, str]()
    for number, part in enumerate(parts, start=1):
        file = out / f"model-{number:05}-of-{len(parts):05}.safetensors"
        write_tensors(file, part, _FORMAT)
        files.append(file)
        weight_map |= dict.fromkeys(part, file.name)
    index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
    index_file = out / "model.safetensors.index.json"
    write_durably(index_file, json.dumps(index, indent=2) + "\n")
    return [*files, index_file]


class AdapterConfig(Protocol):
    """The part of a `peft.PeftConfig` that is needed."""

    def save_pretrained(self, save_directory: str) -> None:
        """Write ``adapter_config.json`` into a folder."""


def export_adapter(
    path: str | Path,
    out: str | Path,
    config: AdapterConfig,
    *,
    adapter: str = "default",
) -> list[Path]:
    """Write the adapter that a checkpoint holds, for ``PeftModel.from_pretrained``.

    Args:
        path: a checkpoint of ``peft_model``, or of its base model, whole or of its
            trainable parameters, or a folder of them (the newest undamaged one counts).
        out: a folder, made if it is not there.
        config: ``peft_model.peft_config[adapter]``.
        adapter: its name in the model.

    Returns:
        The two files.

    Raises:
        CheckpointError: there is no undamaged checkpoint, or no such adapter in it.
    """
    tensors = {
        _peft_name(name, adapter): tensor.clone()  # tied ones share their memory
        for name, tensor in read_model(path).items()
        if adapter in name.split(".")
    }
    if not tensors:
        raise CheckpointError(
            f"{path} holds no parameter of an adapter {adapter!r}; save a pipeline of "
            "the PeftModel, or of its base model, and give adapter= its name"
        )
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "adapter_model.safetensors"
    write_tensors(file, tensors, _FORMAT)
    config.save_pretrained(str(out))
    return [file, out / "adapter_config.json"]


def _peft_name(name: str, adapter: str) -> str:
    """Name in peft's files of a tensor of the model that peft has changed.

    >>> _peft_name("model.q_proj.lora_A.default.weight", "default")
    'base_model.model.model.q_proj.lora_A.weight'

    A pipeline of the `PeftModel` itself has peft's own names:

    >>> _peft_name("base_model.model.model.q_proj.lora_A.default.weight", "default")
    'base_model.model.model.q_proj.lora_A.weight'
    """
    parts = name.removeprefix("base_model.model.").split(".")
    at = parts.index(adapter)
    above = parts[:at]
    if above and above[-1] == "modules_to_save":
        above = above[:-1]
    return ".".join(["base_model", "model", *above, *parts[at + 1 :]])
