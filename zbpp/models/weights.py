"""Weights of a model on the meta device, made only where they are needed.

    a seed         each module's own initialisation, from (seed, its name)
    a state dict   its tensors, by the model's own names
    a folder       its safetensors files, with or without an index
    a file         one of safetensors

A seed belongs to a module, not to a process: any number of stages draws the same.
Buffers that no checkpoint holds come from the initialisation in any case.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.core import RequestError, a_kind
from zbpp.runtime.support.collectives import groups_kept
from zbpp.runtime.support.random_state import random_state, seed_torch, set_random_state
from zbpp.runtime.support.torch_internals import is_fake

__all__ = ["Source", "Weights", "is_on_meta", "reset"]

Source = int | Mapping[str, Tensor] | str | Path
"""A seed, tensors by name, or safetensors files."""

Read = Callable[[str], Tensor | None]
"""From a name to a tensor; None: there is none."""

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def is_on_meta(model: nn.Module) -> bool:
    """True if a model has been made without weights."""
    return any(p.is_meta for p in model.parameters())


def reset(name: str, module: nn.Module) -> None:
    """Initialise a module as its class does by itself."""
    for method in ("reset_parameters", "_reset_parameters"):
        if callable(initialiser := getattr(module, method, None)):
            initialiser()
            return


class Weights:
    """Makes modules of a model on meta with weights.

    Args:
        model: on the meta device.
        source: of the weights.
        init: called with the name of a module and the module, whose children it leaves
            alone; gives parameters and buffers their first values.
    """

    def __init__(
        self,
        model: nn.Module,
        source: Source,
        init: Callable[[str, nn.Module], None] = reset,
    ) -> None:
        self._model, self._init = model, init
        self._seed = source if isinstance(source, int) else 0
        self._read = None if isinstance(source, int) else _reader(source)
        first: dict[int, str] = {}
        self._canonical = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }

    def make(self, name: str) -> nn.Module:
        """Copy a module of the model, with weights.

        Raises:
            RequestError: a tensor is in no file, or has no initialisation.
        """
        return self._make(name, self._model.get_submodule(name))

    def make_alone(self, name: str) -> nn.Module:
        """Copy a module of the model with weights, without its children."""
        alone = copy.copy(self._model.get_submodule(name))
        alone.__dict__["_modules"] = {}
        return self._make(name, alone)

    def _make(self, name: str, module: nn.Module) -> nn.Module:
        unset = {id(t): _unset(t) for t in _on_meta(module)}
        made = copy.deepcopy(module, {**groups_kept(module), **unset})
        if any(is_fake(t) for t in unset.values()):
            return made  # an estimate of memory asks for sizes alone
        self._fill(
            (".".join(filter(None, (name, within))), part)
            for within, part in made.named_modules()
        )
        return made

    @torch.no_grad()
    def _fill(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Give modules on meta, each listed before its children, their tensors.

        All are initialised, children first, as a parent may have its own way for what
        its children hold; then they get what is given.
        """
        parts = list(modules)
        values: dict[nn.Module, dict[str, Tensor]] = {}
        for name, part in parts:
            values[part] = self._given(name, part)
        for name, part in reversed(parts):
            self._draw(name, part)
        for name, part in parts:
            self._copy(name, part, values[part])
        for name, part in parts:
            self._check(name, part, values[part])

    def _copy(self, name: str, part: nn.Module, values: Mapping[str, Tensor]) -> None:
        for key, tensor in values.items():
            target: Tensor | None = part._parameters.get(key)
            target = part._buffers[key] if target is None else target
            assert target is not None
            if target.shape != tensor.shape:
                raise RequestError(
                    f"{name}.{key} has the shape {tuple(tensor.shape)} in the weights "
                    f"given, and {tuple(target.shape)} in the model"
                )
            target.copy_(tensor)

    def _draw(self, name: str, part: nn.Module) -> None:
        """Initialise one module by its own seed."""
        device = torch.device("cpu")
        before = random_state(device)
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        seed_torch(int.from_bytes(digest[:7], "big"), device)
        try:
            self._init(name, part)
        finally:
            set_random_state(before, device)

    def _given(self, name: str, part: nn.Module) -> dict[str, Tensor]:
        """Tensors of a module that come from the source, or from its tied twin."""
        values: dict[str, Tensor] = {}
        hidden = part._non_persistent_buffers_set
        for key, tensor in {**part._parameters, **part._buffers}.items():
            if tensor is None or key in hidden:
                continue
            full = f"{name}.{key}" if name else key
            first = self._canonical.get(full, full)
            if self._read is not None:
                value = self._read(full)
                value = self._read(first) if value is None else value
                if value is None:
                    raise RequestError(
                        f"the weights have no tensor {full}; where a checkpoint has "
                        "other names, load the model by from_pretrained and cut it"
                    )
                values[key] = value
            elif first != full:
                above, _, last = first.rpartition(".")
                values[key] = self.make_alone(above).get_parameter(last).detach()
        return values

    def _check(self, name: str, part: nn.Module, values: Mapping[str, Tensor]) -> None:
        """Refuse a tensor that nothing has given a value."""
        for key, tensor in {**part._parameters, **part._buffers}.items():
            if tensor is None or key in values or not tensor.numel():
                continue
            if is_fake(tensor):
                continue  # an estimate: there are no numbers
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                full = f"{name}.{key}" if name else key
                raise RequestError(
                    f"{full} has no initialisation: {a_kind(part)} has "
                    "no reset_parameters, and the model none for it; give weights= a "
                    "state dict or files, or make the model on a real device"
                )


def _on_meta(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers that have no memory, each once."""
    every = (*module.parameters(), *module.buffers())
    return [tensor for tensor in dict.fromkeys(every) if tensor.is_meta]


def _unset(tensor: Tensor) -> Tensor:
    """Memory for a tensor, of values that are no numbers."""
    fill = float("nan") if tensor.is_floating_point() else 0
    made = torch.full(tensor.shape, fill, dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _reader(source: Mapping[str, Tensor] | str | Path) -> Read:
    """Read tensors of a source by their names there."""
    if isinstance(source, Mapping):
        return source.get
    path = Path(source)
    if path.is_dir() and (path / _INDEX).exists():
        listed = json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = {name: path / file for name, file in listed.items()}
    else:
        single = path / _SINGLE if path.is_dir() else path
        if not single.exists():
            raise RequestError(
                f"{path} holds no safetensors files; it needs {_SINGLE}, or {_INDEX}"
            )
        files = dict.fromkeys(_open(single).keys(), single)
    return partial(_read, files, {})


def _read(
    files: Mapping[str, Path], opened: dict[Path, Any], name: str
) -> Tensor | None:
    if name not in files:
        return None
    path = files[name]
    if path not in opened:
        opened[path] = _open(path)
    tensor: Tensor = opened[path].get_tensor(name)
    return tensor


def _open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise RequestError("safetensors files need the extra zbpp[hf]") from error
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error
