"""State of any torch optimizers by the names of their parameters.

    {"0.weight": [{"kind": "AdamW", "state": {"exp_avg": ...}, "options": {"lr": ...}}]}

A list, as several optimizers may step one parameter. Options are kept per parameter:
another number of stages has other groups. State is put where the optimizer keeps it,
without a step and without a cast: torch's own loading makes moments as narrow as their
parameters.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zbpp.checkpoint.owned import Owned
from zbpp.checkpoint.shards import in_parts

__all__ = ["check_optimizers", "load_optimizers", "optimizer_state"]

Entries = Mapping[str, list[dict[str, Any]]]

_OF_THE_MACHINE = ("foreach", "fused", "capturable", "differentiable")
"""Options about the way to compute: those of the present run stay."""


def optimizer_state(
    owned: Owned, *, saved: bool = False, trainable_only: bool = False
) -> dict[str, list[Any]]:
    """State and options of every parameter that an optimizer steps.

    Args:
        owned: layers and optimizers.
        saved: leave out what another stage saves.
        trainable_only: leave out frozen parameters.
    """
    found: dict[str, list[Any]] = {}
    for optimizer, group, p in _stepped(owned):
        slot = owned.name_of(p)
        if trainable_only and not p.requires_grad:
            continue
        if (slot.saves or not saved) and not slot.is_copy:
            found.setdefault(slot.name, []).append(
                {
                    "kind": type(optimizer).__name__,
                    "state": dict(optimizer.state.get(p, {})),
                    "options": _options(group),
                }
            )
    return found


def check_optimizers(
    owned: Owned,
    entries: Entries,
    aliases: Mapping[str, str],
    *,
    trainable_only: bool = False,
) -> tuple[set[str], list[str]]:
    """Compare a state with the optimizers.

    Args:
        owned: layers and optimizers.
        entries: of the state.
        aliases: other names of tied tensors.
        trainable_only: frozen parameters need not be in it.

    Returns:
        Names in the state that were used, and words about what does not fit.
    """
    used, wrong = set[str](), list[str]()
    find = _Entries(owned, entries, aliases)
    for optimizer, group in _groups(owned):
        told: dict[str, Any] = {}
        for p in group["params"]:
            name = owned.name_of(p).name
            given = find.of(optimizer, p)
            if given is None and trainable_only and not p.requires_grad:
                continue
            if given is None:
                wrong.append(f"the optimizer's state of {name} is missing")
                continue
            used.add(find.key(name))
            wrong += [f"the optimizer's {one}" for one in _misfits(p, name, given)]
            kind = type(optimizer).__name__
            if given["kind"] != kind:
                wrong.append(
                    f"the optimizer's state of {name} is that of {given['kind']}, and "
                    f"the optimizer is {kind}"
                )
            told.setdefault(repr(given["options"]), name)
        if len(told) > 1:
            first, second = list(told.values())[:2]
            wrong.append(
                f"{first} and {second} are in one parameter group, but were saved "
                "with different options"
            )
    return used, wrong


def load_optimizers(owned: Owned, entries: Entries, aliases: Mapping[str, str]) -> None:
    """Put a state that `check_optimizers` has found right into the optimizers."""
    find = _Entries(owned, entries, aliases)
    for optimizer, group in _groups(owned):
        for p in group["params"]:
            given = find.of(optimizer, p)
            if given is None:  # frozen, and not saved
                continue
            state = {k: _placed(v, p, group) for k, v in given["state"].items()}
            if state:
                optimizer.state[p] = state
            else:
                optimizer.state.pop(p, None)
            for name, value in given["options"].items():
                _set_option(group, name, value)


def _groups(owned: Owned) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    for optimizer in owned.optimizers:
        for group in optimizer.param_groups:
            yield optimizer, group


def _stepped(
    owned: Owned,
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], Tensor]]:
    for optimizer, group in _groups(owned):
        for p in group["params"]:
            yield optimizer, group, p


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    kept = group.keys() - {"params", "param_names", *_OF_THE_MACHINE}
    return {name: group[name] for name in group if name in kept}


class _Entries:
    """The entries of a saved state by optimizer and parameter."""

    def __init__(
        self, owned: Owned, entries: Entries, aliases: Mapping[str, str]
    ) -> None:
        self._owned, self._entries, self._aliases = owned, entries, aliases
        self._holders: dict[int, list[torch.optim.Optimizer]] = {}
        for optimizer, _, p in _stepped(owned):
            self._holders.setdefault(id(p), []).append(optimizer)

    def key(self, name: str) -> str:
        """Name in the saved state."""
        return name if name in self._entries else self._aliases.get(name, name)

    def of(self, optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Any] | None:
        """None if there is none for each of the optimizers that step it."""
        given = self._entries.get(self.key(self._owned.name_of(p).name), [])
        holders = self._holders[id(p)]
        fits = len(given) == len(holders)
        return given[holders.index(optimizer)] if fits else None


def _misfits(p: Tensor, name: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Tensors of a state have the shape of their parameter, or one of their own."""
    for key, value in given["state"].items():
        if isinstance(value, Tensor) and value.dim() == p.dim() > 0:
            factored = any(
                n not in (1, own) for n, own in zip(value.shape, p.shape, strict=True)
            )
            if factored:
                yield (
                    f"{key} of {name} has shape {tuple(value.shape)}, the parameter "
                    f"{tuple(p.shape)}"
                )


def _placed(value: Any, p: Tensor, group: Mapping[str, Any]) -> Any:
    """A copy where the optimizer wants it: many keep single numbers on the host."""
    if not isinstance(value, Tensor):
        return value
    value = in_parts(value, p)
    on_device = value.dim() > 0 or group.get("capturable") or group.get("fused")
    return value.detach().to(p.device if on_device else value.device, copy=True)


def _set_option(group: dict[str, Any], name: str, value: Any) -> None:
    held = group.get(name)
    if isinstance(held, Tensor):  # a scheduler may hold the same tensor
        held.copy_(torch.as_tensor(value))
    else:
        group[name] = value.clone() if isinstance(value, Tensor) else value
