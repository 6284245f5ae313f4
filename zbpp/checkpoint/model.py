"""Parameters and buffers of one process, by the model's own names.

A `LocalModel` is what one process has: the layers of its stages, or a plain module as
a whole. A parameter that several layers share is saved once, under its first name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.runtime.support.pytree import map_tensors

__all__ = [
    "Fit",
    "LocalModel",
    "Pairs",
    "Place",
    "Slot",
    "State",
    "check_model",
    "load_model",
    "room_for",
]

Place = tuple[int, str]
"""Global index of a layer, and a name in it."""

Pairs = list[tuple[Tensor, Tensor]]
"""Tensors of a state, each with the tensor that is to have its numbers."""

State = dict[str, Any]
"""Of a run, by its parts; see `zbpp.checkpoint.state`."""


@dataclass(frozen=True)
class Slot:
    """A parameter, a persistent buffer or an extra state of a module.

    ``name`` is the model's own, ``saved_as`` that of the first layer that has it: there
    ``saves`` is true. ``set_extra`` is None for tensors.
    """

    name: str
    saved_as: str
    value: Any
    saves: bool
    set_extra: Callable[[Any], None] | None = None

    @property
    def is_trainable(self) -> bool:
        """True for a parameter that is not frozen."""
        return isinstance(self.value, Tensor) and self.value.requires_grad

    def names_in(self, aliases: Mapping[str, str]) -> set[str]:
        """Names that a state with these aliases may have for it."""
        return {self.saved_as, self.name, aliases.get(self.name, self.name)}


class LocalModel:
    """The layers, optimizers and schedulers of one process.

    Args:
        layers: by global index.
        own_name: the model's own name of what a layer has under a name.
        ties: places of parameters that are one in the model.
        optimizers: of the parameters, by stage.
        schedulers: of the optimizers.
    """

    def __init__(
        self,
        layers: Iterable[tuple[int, nn.Module]],
        own_name: Callable[[int, str], str],
        *,
        ties: Sequence[Sequence[Place]] = (),
        optimizers: Sequence[Sequence[torch.optim.Optimizer]] = (),
        schedulers: Sequence[Any] = (),
    ) -> None:
        self._own_name = own_name
        self._first_of: dict[Place, Place] = {
            place: tie[0] for tie in ties for place in tie
        }
        self.optimizers_by_stage, self.schedulers = optimizers, tuple(schedulers)
        self.optimizers = [x for of_stage in optimizers for x in of_stage]
        found = list(self._find(sorted(layers, key=lambda pair: pair[0])))
        self.slots = [slot for _, slot in found]
        self._slots: dict[int, Slot] = {
            id(value): slot
            for value, slot in reversed(found)
            if isinstance(value, Tensor)
        }

    def _find(
        self, layers: Iterable[tuple[int, nn.Module]]
    ) -> Iterator[tuple[Any, Slot]]:
        """Yield each tensor and state that layers have, and its slot."""
        names: dict[int, str] = {}  # of the tensors seen
        for index, layer in layers:
            for name, value in layer.state_dict(keep_vars=True).items():
                place = index, name
                first = self._first_of.get(place, place)
                saved_as = self._own_name(*first)
                is_repeated = isinstance(value, Tensor) and id(value) in names
                if isinstance(value, Tensor):
                    saved_as = names.setdefault(id(value), saved_as)
                path, _, last = name.rpartition(".")
                slot = Slot(
                    self._own_name(*place),
                    saved_as,
                    value,
                    saves=first == place and not is_repeated,
                    set_extra=layer.get_submodule(path).set_extra_state
                    if last == "_extra_state"
                    else None,
                )
                yield value, slot

    def slot_of(self, parameter: Tensor) -> Slot:
        """The first slot of a parameter.

        Raises:
            RequestError: it is in no layer.
        """
        slot = self._slots.get(id(parameter))
        if slot is None:
            raise RequestError(
                f"an optimizer steps a parameter of shape {tuple(parameter.shape)} "
                "that is in no layer of the model, so a checkpoint has no name for it"
            )
        return slot

    def aliases(self) -> dict[str, str]:
        """Names of what is saved under another name, with that."""
        return {s.name: s.saved_as for s in self.slots if s.name != s.saved_as}


@dataclass
class Fit:
    """The fit of a state to one process, and what is to be loaded of it.

    Args:
        wrong: what does not fit, in words.
        used: names in the state that this process needs, by part of the state.
        model: slots and their values.
        optimizers: each with a group, a parameter of that, and the parameter's state.
        schedulers: each with its state.
    """

    wrong: list[str] = field(default_factory=list)
    used: dict[str, set[str]] = field(default_factory=dict)
    model: list[tuple[Slot, Any]] = field(default_factory=list)
    optimizers: list[
        tuple[torch.optim.Optimizer, dict[str, Any], Tensor, Mapping[str, Any]]
    ] = field(default_factory=list)
    schedulers: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)


def check_model(local: LocalModel, state: State, fit: Fit) -> None:
    """Find the value of every slot in a state for these layers, or for more."""
    model, aliases = state["model"], state.get("aliases", {})
    used = fit.used["model"] = set()
    for slot in local.slots:
        names = {name for name in slot.names_in(aliases) if name in model}
        if not names:
            if slot.is_trainable or not state.get("trainable_only"):
                fit.wrong.append(f"{slot.name} is missing")
            continue
        used |= names
        saved, here = model[min(names)], slot.value
        fit.model.append((slot, saved))
        if isinstance(here, Tensor) != isinstance(saved, Tensor):
            text = f"{slot.name} is a {type(saved).__name__} in the state"
            fit.wrong.append(text)
        elif isinstance(saved, Tensor):
            if saved.shape != here.shape:
                fit.wrong.append(
                    f"{slot.name} has shape {tuple(saved.shape)}, the model's "
                    f"{tuple(here.shape)}"
                )
            if saved.dtype != here.dtype:
                fit.wrong.append(
                    f"{slot.name} has dtype {saved.dtype}, the model's {here.dtype}"
                )


def load_model(fit: Fit, pairs: Pairs) -> list[Callable[[], None]]:
    """Find what is to be copied; return what sets extra states after that."""
    then: list[Callable[[], None]] = []
    for slot, value in fit.model:
        if slot.set_extra is None:
            pairs.append((value, slot.value.detach()))
        else:
            then.append(partial(slot.set_extra, room_for(value, pairs)))
    return then


def room_for(value: Any, pairs: Pairs, device: torch.device | None = None) -> Any:
    """A value with new tensors, which are to have the numbers of its own.

    Args:
        value: of a state.
        pairs: gets each tensor with the new one.
        device: of the new ones; None: as they are, and on the CPU where they have none.
    """

    def room(tensor: Tensor) -> Tensor:
        where = device or (torch.device("cpu") if tensor.is_meta else tensor.device)
        pairs.append((tensor, torch.empty_like(tensor, device=where)))
        return pairs[-1][1]

    return map_tensors(value, room)
