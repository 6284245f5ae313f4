"""Parameters, buffers and optimizer state by the model's own names.

An `Owned` is what one process holds: the layers of its stages, or a plain module as a
whole. A parameter that several layers hold is saved once, under its first name.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.checkpoint.shards import put_into
from zbpp.core import RequestError

__all__ = [
    "Owned",
    "Slot",
    "check_model",
    "load_model",
    "model_state",
    "plainly_owned",
]

Place = tuple[int, str]
"""Global index of a layer, and a name in it."""


@dataclass(frozen=True)
class Slot:
    """A parameter, a persistent buffer or an extra state of a module.

    ``name`` is the one that it is saved under, ``own`` the model's name of this holder;
    ``saves`` is true for the first holder. ``set_extra`` is None for tensors.
    ``is_copy``: another stage of this process steps a tensor of its own for it.
    """

    name: str
    own: str
    value: Any
    saves: bool
    set_extra: Callable[[Any], None] | None = None
    is_copy: bool = False

    @property
    def is_trainable(self) -> bool:
        """True for a parameter that is not frozen."""
        return isinstance(self.value, Tensor) and self.value.requires_grad


class Owned:
    """The modules and optimizers of one process.

    Args:
        layers: by global index.
        own_name: the model's own name of a layer's parameter.
        ties: places of parameters that are one in the model.
        copies: of tied parameters, each with the one that is in a layer.
        optimizers: of the parameters.
        schedulers: of the optimizers.

    Raises:
        RequestError: an optimizer steps a parameter that is in no layer.
    """

    def __init__(
        self,
        layers: Iterable[tuple[int, nn.Module]],
        own_name: Callable[[int, str], str],
        *,
        ties: Sequence[Sequence[Place]] = (),
        copies: Mapping[Tensor, Tensor] | None = None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Sequence[Any] = (),
    ) -> None:
        self._own_name = own_name
        self._first: dict[Place, Place] = {
            (index, name): tie[0] for tie in ties for index, name in tie
        }
        self.optimizers, self.schedulers = tuple(optimizers), tuple(schedulers)
        self.slots = list(self._find(sorted(layers, key=lambda one: one[0])))
        self._names = {
            id(slot.value): slot for slot in reversed(self.slots) if _is_tensor(slot)
        }
        for copy, original in (copies or {}).items():
            slot = self._names[id(original)]
            self._names[id(copy)] = replace(slot, saves=False, is_copy=True)

    def _find(self, layers: Iterable[tuple[int, nn.Module]]) -> Iterator[Slot]:
        seen: dict[int, str] = {}
        for index, layer in layers:
            for name, value in layer.state_dict(keep_vars=True).items():
                own = self._own_name(index, name)
                first = self._first.get((index, name), (index, name))
                called = self._own_name(*first)
                again = isinstance(value, Tensor) and id(value) in seen
                if again:
                    called = seen[id(value)]
                elif isinstance(value, Tensor):
                    seen[id(value)] = called
                saves = first == (index, name) and not again
                extra = None
                path, _, last = name.rpartition(".")
                if last == "_extra_state":
                    extra = layer.get_submodule(path).set_extra_state
                yield Slot(called, own, value, saves, extra)

    def name_of(self, parameter: Tensor) -> Slot:
        """The first slot of a parameter.

        Raises:
            RequestError: it is in no layer.
        """
        slot = self._names.get(id(parameter))
        if slot is None:
            raise RequestError(
                f"an optimizer steps a parameter of shape {tuple(parameter.shape)} "
                "that is in no layer of the model, so a checkpoint has no name for it"
            )
        return slot

    def aliases(self) -> dict[str, str]:
        """The names of holders that do not save, and what they are saved under."""
        return {s.own: s.name for s in self.slots if s.own != s.name}


def _is_tensor(slot: Slot) -> bool:
    return isinstance(slot.value, Tensor)


def plainly_owned(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    schedulers: Sequence[Any] = (),
    *,
    own_name: Callable[[str], str] | None = None,
) -> Owned:
    """A whole module, under its own names, or what ``own_name`` makes of them."""
    return Owned(
        [(0, model)],
        lambda _, name: own_name(name) if own_name is not None else name,
        optimizers=optimizers,
        schedulers=schedulers,
    )


def model_state(owned: Owned) -> dict[str, Any]:
    """Tensors (those of the model, no copies) and extra states by all own names."""
    state = {slot.own: slot.value for slot in owned.slots}
    return {n: v.detach() if isinstance(v, Tensor) else v for n, v in state.items()}


def check_model(
    owned: Owned,
    model: Mapping[str, Any],
    aliases: Mapping[str, str],
    *,
    trainable_only: bool = False,
) -> tuple[set[str], list[str]]:
    """Compare a state with the model.

    Args:
        owned: to be loaded.
        model: a state, by own names, for these layers or for more.
        aliases: other names of tied tensors.
        trainable_only: nothing else needs to be in the state.

    Returns:
        Names in the state that were used, and words about what does not fit.
    """
    used, wrong = set[str](), list[str]()
    for slot in owned.slots:
        found = _given(slot, model, aliases)
        if found is None and trainable_only and not slot.is_trainable:
            continue
        if found is None:
            wrong.append(f"{slot.own} is missing")
            continue
        used |= found
        given = model[min(found)]
        if isinstance(slot.value, Tensor) != isinstance(given, Tensor):
            wrong.append(f"{slot.own} is a {type(given).__name__} in the state")
        elif isinstance(given, Tensor):
            for what in ("shape", "dtype"):
                here, there = getattr(slot.value, what), getattr(given, what)
                if here != there:
                    here, there = _text(here), _text(there)
                    wrong.append(f"{slot.own} has {what} {there}, the model's {here}")
    return used, wrong


def _text(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def _given(
    slot: Slot, model: Mapping[str, Any], aliases: Mapping[str, str]
) -> set[str] | None:
    names = {slot.name, slot.own, aliases.get(slot.own, slot.own)}
    return {name for name in names if name in model} or None


def load_model(
    owned: Owned, model: Mapping[str, Any], aliases: Mapping[str, str]
) -> None:
    """Copy a state that `check_model` has found right into the model."""
    with torch.no_grad():
        for slot in owned.slots:
            found = _given(slot, model, aliases)
            if found is None:  # frozen, and not saved
                continue
            if slot.set_extra is not None:
                slot.set_extra(model[min(found)])
            else:
                put_into(slot.value, model[min(found)])
