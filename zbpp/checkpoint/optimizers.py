"""State of torch optimizers and of their LR schedulers, by the names of parameters.

    {"0.weight": [{"kind": "AdamW", "state": {"exp_avg": ...}, "options": {"lr": ...}}]}

A list, as several optimizers may step one parameter. Options are kept per parameter:
another number of stages has other groups. State is put where the optimizer keeps it,
without a step and without a cast: `Optimizer.load_state_dict` makes moments as narrow
as their parameters, and torch's `set_optimizer_state_dict` steps to make them.

All stages have the same schedulers, so there is one state of each, whatever stages
load it. Groups must be the same on all stages; a group may be empty.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from zbpp.checkpoint.model import Checked, LocalModel, State
from zbpp.checkpoint.tensors import shard_like
from zbpp.checkpoint.values import misfit
from zbpp.core import RequestError

__all__ = [
    "Entry",
    "check_optimizers",
    "check_schedulers",
    "load_optimizers",
    "optimizer_state",
    "scheduler_state",
    "schedulers_differ",
]

Entry = Mapping[str, Any]
"""State of one parameter in one optimizer: ``kind``, ``state`` and ``options``."""

_OF_THE_MACHINE = ("foreach", "fused", "capturable", "differentiable")
"""Options about the way to compute: those of the present run stay."""


def optimizer_state(
    local: LocalModel, *, saved: bool = False, trainable_only: bool = False
) -> dict[str, list[Entry]]:
    """State and options of every parameter that an optimizer steps.

    Args:
        local: layers and optimizers.
        saved: leave out what another stage saves.
        trainable_only: leave out frozen parameters.
    """
    entries: dict[str, list[Entry]] = {}
    for optimizer, group in _groups(local):
        kept = group.keys() - {"params", "param_names", *_OF_THE_MACHINE}
        options = {name: group[name] for name in group if name in kept}
        for parameter in group["params"]:
            slot = local.slot_of(parameter)
            if slot.is_copy or (saved and not slot.saves):
                continue
            if trainable_only and not parameter.requires_grad:
                continue
            entry = {
                "kind": type(optimizer).__name__,
                "state": {
                    key: local.experts.joined(parameter, value)
                    for key, value in optimizer.state.get(parameter, {}).items()
                },
                "options": dict(options),
            }
            entries.setdefault(slot.saved_as, []).append(entry)
    return entries


def check_optimizers(local: LocalModel, state: State, checked: Checked) -> None:
    """Find the state of every parameter that an optimizer steps."""
    all_entries, aliases = state.get("optimizer", {}), state.get("aliases", {})
    used = checked.used["optimizer"] = set()
    stepping = defaultdict[int, list[torch.optim.Optimizer]](list)
    for optimizer, group in _groups(local):
        for parameter in group["params"]:
            stepping[id(parameter)].append(optimizer)
    for optimizer, group in _groups(local):
        first_with = dict[str, str]()  # options, and the first parameter that has them
        for parameter in group["params"]:
            name = local.slot_of(parameter).saved_as
            key = name if name in all_entries else aliases.get(name, name)
            entries, optimizers = all_entries.get(key, ()), stepping[id(parameter)]
            if len(entries) == len(optimizers):
                entry = entries[optimizers.index(optimizer)]
                used.add(key)
                checked.optimizers.append((optimizer, group, parameter, entry))
                whole = local.slot_of(parameter).value
                checked.wrong += _misfits(optimizer, group, whole, entry, name)
                first_with.setdefault(repr(entry["options"]), name)
            elif parameter.requires_grad or not state.get("trainable_only"):
                checked.wrong.append(f"the optimizer's state of {name} is missing")
        if len(first_with) > 1:
            first, second, *_ = first_with.values()
            checked.wrong.append(
                f"{first} and {second} are in one parameter group, but were saved "
                "with different options"
            )


def _groups(
    local: LocalModel,
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    for optimizer in local.optimizers:
        for group in optimizer.param_groups:
            yield optimizer, group


def _misfits(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    entry: Entry,
    name: str,
) -> Iterator[str]:
    for key, value in entry["state"].items():
        if not isinstance(value, Tensor) or not value.dim() == parameter.dim() > 0:
            continue
        lengths = zip(value.shape, parameter.shape, strict=True)
        if any(saved not in (1, here) for saved, here in lengths):  # 1: factored state
            yield (
                f"the optimizer's {key} of {name} has shape {tuple(value.shape)}, the "
                f"parameter {tuple(parameter.shape)}"
            )
    for option, value in entry["options"].items():
        here = group.get(option)
        if type(here) is int:  # torch writes 0 for 0.0: a decay may have grown since
            here = float(here)
        text = misfit(value, here, f"the optimizer's {option} of {name}")
        if text is not None:
            yield text
    kind = type(optimizer).__name__
    if entry["kind"] != kind:
        yield (
            f"the optimizer's state of {name} is that of {entry['kind']}, and the "
            f"optimizer is {kind}"
        )


def load_optimizers(checked: Checked) -> None:
    """Put a state that fits into the optimizers and schedulers."""
    for optimizer, group, parameter, entry in checked.optimizers:
        # many optimizers keep single numbers, as the step, on the host
        on_device = bool(group.get("capturable") or group.get("fused"))
        placed = {
            key: _placed(
                checked.experts.own_part(parameter, value), parameter, on_device
            )
            for key, value in entry["state"].items()
        }
        if placed:
            optimizer.state[parameter] = placed
        else:
            optimizer.state.pop(parameter, None)
        for name, value in entry["options"].items():
            _set_option(group, name, value)
    for scheduler, state in checked.schedulers:
        scheduler.load_state_dict(deepcopy(state))
        rates = getattr(scheduler, "_last_lr", [])
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            if not group["params"]:  # no saved parameter has had its options
                _set_option(group, "lr", rate)


def _set_option(group: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(group.get(name), Tensor):  # a scheduler may hold the same
        group[name].copy_(torch.as_tensor(value))
    else:
        group[name] = value.clone() if isinstance(value, Tensor) else value


def _placed(value: Any, parameter: Tensor, on_device: bool) -> Any:
    """A copy of a value, where and sharded as the optimizer of a parameter wants it."""
    if not isinstance(value, Tensor):
        return value
    value = shard_like(value, parameter)
    device = parameter.device if on_device or value.dim() > 0 else value.device
    return value.detach().to(device, copy=True)


def scheduler_state(local: LocalModel) -> dict[str, dict[str, Any]]:
    """State of every scheduler, which all stages share, by name.

    Raises:
        RequestError: the stages of this process do not have the same.
    """
    states: dict[str, dict[str, Any]] = {}
    for name, scheduler in _schedulers(local):
        state = scheduler.state_dict()
        if repr(states.setdefault(name, state)) != repr(state):
            raise RequestError(schedulers_differ(name))
    return states


def schedulers_differ(name: str) -> str:
    """Describe schedulers of one name whose states are not the same."""
    return (
        f"the stages have {name} with different states, but a checkpoint has one for "
        "all stages; step them together, and give every stage the same parameter "
        "groups in the same order, empty ones too"
    )


def _schedulers(local: LocalModel) -> Iterator[tuple[str, Any]]:
    """Yield each scheduler with a name that is the same on all stages."""
    for optimizers in local.optimizers_by_stage:
        kinds = Counter[str]()
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            of_it = [x for x in local.schedulers if x.optimizer is optimizer]
            for number, scheduler in enumerate(of_it):
                own = f"{type(scheduler).__name__} {number}"
                yield f"{own} of {kind} {kinds[kind]}", scheduler
            kinds[kind] += 1


def check_schedulers(local: LocalModel, state: State, checked: Checked) -> None:
    """Find the state of every scheduler."""
    saved = state.get("schedulers", {})
    for name, scheduler in _schedulers(local):
        where = f"the state of {name}"
        if name not in saved:
            checked.wrong.append(f"{where} is missing")
        elif text := _scheduler_misfit(saved[name], scheduler.state_dict(), where):
            checked.wrong.append(text)
        else:
            checked.schedulers.append((scheduler, saved[name]))
    if saved and not local.schedulers and local.optimizers:
        checked.wrong.append(
            "there is a state of schedulers, but none are attached: call "
            "pipeline.attach(*schedulers) first"
        )


def _scheduler_misfit(saved: Any, here: dict[str, Any], where: str) -> str | None:
    """Describe what does not fit; versions of torch keep other parts."""
    if not isinstance(saved, dict):
        return f"{where} is a {type(saved).__name__}"
    shared = {name: value for name, value in here.items() if name in saved}
    if text := misfit(saved, shared, where):
        return text
    for part, what in {"_last_lr": "parameter groups", "_schedulers": "parts"}.items():
        n_saved, n_here = (len(state.get(part) or ()) for state in (saved, here))
        if n_saved != n_here:
            return f"{where} has {n_saved} {what}, here {n_here}"
    parts = saved.get("_schedulers") or (), here.get("_schedulers") or ()
    texts = (_scheduler_misfit(*pair, where) for pair in zip(*parts, strict=True))
    return next((text for text in texts if text), None)
