"""Find parameters that layers share, also across processes.

In a list of layers they are one object. Of a builder, a process sees its own layers
only. A parameter that another module holds as well, be it alive or dropped by the
builder since, may belong to a layer of another chunk. Then, and only then, the builder
is called once more, for all layers: who shares what is certain where all come from one
call.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zbpp.core import RequestError
from zbpp.runtime.support.devices import built_for
from zbpp.runtime.ties.plan import Tie

__all__ = ["BuilderWatch", "find_ties", "refuse_sharing"]

Build = Callable[[range], Sequence[nn.Module]]


def find_ties(layers: Sequence[nn.Module]) -> tuple[Tie, ...]:
    """Find parameters that are one object in several layers.

    >>> layers = [nn.Embedding(5, 3), nn.Linear(3, 5)]
    >>> layers[1].weight = layers[0].weight
    >>> find_ties(layers)
    (((0, 'weight'), (1, 'weight')),)
    """
    homes: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            homes.setdefault(parameter, []).append((index, name))
    return tuple(tuple(home) for home in homes.values() if len(home) > 1)


class BuilderWatch:
    """Calls of a builder, and all modules that were made in them.

    Args:
        build: makes the layers of a range of global indices.
    """

    def __init__(self, build: Build) -> None:
        self._build = build
        self._built: list[nn.Module] = []
        self._made: list[nn.Module] = []

    def layers(self, indices: range) -> list[nn.Module]:
        """Call the builder, and keep what it makes."""
        with _made_modules() as made:
            built = list(self._build(indices))
        self._built += built
        self._made += made
        return built

    def check(self, ranges: Sequence[range]) -> None:
        """Look who else holds the layers; then compare those of all chunks.

        Raises:
            RequestError: they do.
        """
        if len(ranges) > 1 and _is_held_elsewhere(self._built, self._made):
            with _random_numbers_kept():
                built = list(self._build(range(ranges[-1].stop)))
            refuse_sharing((c, i, built[i]) for c, r in enumerate(ranges) for i in r)


def refuse_sharing(layers: Iterable[tuple[int, int, nn.Module]]) -> None:
    """Refuse a parameter in two chunks: it would be trained twice, and drift apart.

    Args:
        layers: chunk, global index and layer.

    Raises:
        RequestError: names both layers and parameters.
    """
    home: dict[nn.Parameter, tuple[int, int, str]] = {}
    for chunk, index, layer in layers:
        for name, parameter in layer.named_parameters():
            other, at, its = home.setdefault(parameter, (chunk, index, name))
            if other != chunk:
                raise RequestError(
                    f"layers {at} and {index} share a parameter ({its} is {name}) but "
                    f"lie in chunks {other} and {chunk}; name the parameter in ties=, "
                    "put them into one chunk by split=..., or untie them"
                )


@contextmanager
def _made_modules() -> Iterator[list[nn.Module]]:
    """Keep every module alive that gets a parameter or a child meanwhile."""
    made: list[nn.Module] = []

    def note(module: nn.Module, name: str, held: Any) -> None:
        made.append(module)

    hooks = [
        register_module_parameter_registration_hook(note),
        register_module_module_registration_hook(note),
    ]
    try:
        yield made
    finally:
        for hook in hooks:
            hook.remove()


def _is_held_elsewhere(layers: Sequence[nn.Module], made: list[nn.Module]) -> bool:
    """True if a foreign module has a parameter, or two have a submodule, of layers.

    One foreign parent is usual: the model that the layers were taken from. All objects
    of the process are looked at once: .1 s for a million.
    """
    own = {id(module) for layer in layers for module in layer.modules()}
    parameters = {id(p) for layer in layers for p in layer.parameters()}
    things = gc.get_objects()
    alive = compress(things, map(_kinds_of(nn.Module).__contains__, map(type, things)))
    foreign = {id(m): m for m in (*alive, *made) if id(m) not in own}
    parents: Counter[int] = Counter()
    for module in foreign.values():
        if any(id(p) in parameters for p in module.__dict__["_parameters"].values()):
            return True
        children = {id(child) for child in module.__dict__["_modules"].values()}
        parents.update(children & own)
    return any(count > 1 for count in parents.values())


def _kinds_of(kind: type) -> set[type]:
    """A class and all that inherit from it, by whatever way."""
    kinds, waiting = {kind}, [kind]
    while waiting:
        new: set[type] = set(waiting.pop().__subclasses__()) - kinds
        kinds |= new
        waiting += new
    return kinds


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Leave torch's generators as if nothing was drawn."""
    kind, devices = built_for(), []
    if kind is not None and torch.get_device_module(kind).is_initialized():
        devices = [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices, device_type=kind or "cpu"):
        yield
