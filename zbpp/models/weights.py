"""Weights of a model on the meta device, made only where they are needed.

    a seed         each module's initialisation, from (seed, its name)
    a state dict   its tensors, by the model's names
    a folder       its safetensors files; or one file

A seed belongs to a module, not to a process: any number of stages draws the same.
Buffers that no checkpoint stores come from the initialisation in any case.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.core import RequestError, a_kind
from zbpp.runtime.support.collectives import groups_kept
from zbpp.runtime.support.random_state import random_state, seed_torch, set_random_state

Source = int | Mapping[str, Tensor] | str | Path
"""A seed, tensors by name, or safetensors files."""


def is_on_meta(model: nn.Module) -> bool:
    """True if a model has been made without weights, which it needs."""
    return any(p.is_meta for p in model.parameters()) and not needs_sizes_alone()


def needs_sizes_alone() -> bool:
    """True within a default device of meta: of a model only its memory is estimated."""
    return torch.get_default_device().type == "meta"


class Weights:
    """Makes modules of a model on meta with weights.

    Args:
        model: on the meta device.
        source: of the weights.
        init: called with the name of a module and the module, whose children it leaves
            alone; gives parameters and buffers their first values.
    """

    def __init__(
        self, model: nn.Module, source: Source, init: Callable[[str, nn.Module], None]
    ) -> None:
        self._model, self._init = model, init
        self._seed = source if isinstance(source, int) else 0
        self._read = None if isinstance(source, int) else _reader(source)
        first: dict[Tensor, str] = {}
        self._first_name = {
            name: first.setdefault(parameter, name)
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        """Of each parameter; files leave out the other names of tied ones."""

    @torch.no_grad()
    def make(self, name: str) -> nn.Module:
        """Copy a module of the model, with weights.

        A parent is initialised after its children, whose weights it may overwrite.

        Raises:
            RequestError: a tensor is in no file, or has no initialisation.
        """
        module = self._model.get_submodule(name)
        if needs_sizes_alone():
            return module
        tensors = (*module.parameters(), *module.buffers())
        unset = {id(t): _unset(t) for t in tensors if t.is_meta}
        clone = copy.deepcopy(module, {**groups_kept(module), **unset})
        for within, part in reversed([*clone.named_modules(prefix=name)]):
            with _drawing(f"{self._seed} {within}"):
                self._init(within, part)
        if self._read is not None:
            for within, tensor in clone.state_dict().items():
                self._load(f"{name}.{within}", tensor, self._read)
        for within, part in clone.named_modules(prefix=name):
            _check(within, part)
        return clone

    def _load(
        self, name: str, tensor: Tensor, read: Callable[[str], Tensor | None]
    ) -> None:
        value = read(name)
        value = read(self._first_name.get(name, name)) if value is None else value
        if value is None:
            raise RequestError(
                f"the weights have no tensor {name}; where a checkpoint has other "
                "names, load the model by from_pretrained and cut it"
            )
        if tensor.shape != value.shape:
            raise RequestError(
                f"{name} has the shape {tuple(value.shape)} in the weights given, and "
                f"{tuple(tensor.shape)} in the model"
            )
        tensor.copy_(value)


@contextmanager
def _drawing(text: str) -> Iterator[None]:
    """Within this, random numbers follow from a text."""
    device = torch.device("cpu")
    before = random_state(device)
    digest = hashlib.sha256(text.encode()).digest()
    seed_torch(int.from_bytes(digest[:7], "big"), device)
    try:
        yield
    finally:
        set_random_state(before, device)


def _check(name: str, part: nn.Module) -> None:
    """Refuse a tensor that nothing has given a value."""
    for key, tensor in {**part._parameters, **part._buffers}.items():
        if tensor is not None and tensor.isnan().any():
            raise RequestError(
                f"{name}.{key} has no initialisation: {a_kind(part)} has none in this "
                "model; give weights= a state dict or files, or make the model on a "
                "real device"
            )


def _unset(tensor: Tensor) -> Tensor:
    """Memory for a tensor, of values that are no numbers."""
    fill = float("nan") if tensor.is_floating_point() else 0
    values = torch.full(tensor.shape, fill, dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values


def _reader(
    source: Mapping[str, Tensor] | str | Path,
) -> Callable[[str], Tensor | None]:
    """Return a function from a name to the tensor in a source; None: there is none."""
    if isinstance(source, Mapping):
        return source.get
    from safetensors import SafetensorError, safe_open

    path = Path(source)
    paths = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    try:
        files: list[Any] = [safe_open(path, framework="pt") for path in paths]
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error
    if not files:
        raise RequestError(f"{path} contains no safetensors files")
    homes = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    return lambda name: homes[name].get_tensor(name) if name in homes else None
