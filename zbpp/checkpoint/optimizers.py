"""State of torch optimizers and of their LR schedulers, by the names of parameters.

    {"0.weight": [{"kind": "AdamW", "state": {"exp_avg": ...}, "options": {"lr": ...}}]}

A list, as several optimizers may step one parameter. Options are saved per parameter:
another number of stages has other groups. State is put where the optimizer keeps it,
without a step and without a cast: `Optimizer.load_state_dict` makes moments as narrow
as their parameters, and torch's `set_optimizer_state_dict` steps to make them.

All stages have the same schedulers, so there is one state of each, whatever stages
load it. Groups must be the same on all stages; a group may be empty.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from zbpp.checkpoint.model import Fit, LocalModel, Pairs, State, room_for
from zbpp.core import RequestError

__all__ = [
    "Entry",
    "check_optimizers",
    "check_schedulers",
    "load_optimizers",
    "load_schedulers",
    "merge_schedulers",
    "optimizer_state",
    "scheduler_states",
]

Entry = Mapping[str, Any]
"""State of one parameter in one optimizer: ``kind``, ``state`` and ``options``."""

_OF_THE_MACHINE = ("foreach", "fused", "capturable", "differentiable")
"""Options about the way to compute: those of the present run stay."""


def optimizer_state(
    local: LocalModel, *, saved: bool = False, trainable_only: bool = False
) -> dict[str, list[Entry]]:
    """State and options of parameters; ``saved``: without what another stage saves."""
    entries: dict[str, list[Entry]] = {}
    for optimizer, group in _groups(local):
        names = group.keys() - {"params", "param_names", *_OF_THE_MACHINE}
        options = {name: group[name] for name in group if name in names}
        for parameter in group["params"]:
            slot = local.slot_of(parameter)
            if saved and not slot.saves:
                continue
            if trainable_only and not parameter.requires_grad:
                continue
            entry = {
                "kind": type(optimizer).__name__,
                "state": dict(optimizer.state.get(parameter, {})),
                "options": dict(options),
            }
            entries.setdefault(slot.saved_as, []).append(entry)
    return entries


def check_optimizers(local: LocalModel, state: State, fit: Fit) -> None:
    """Find the state of every parameter that an optimizer steps."""
    all_entries, aliases = state.get("optimizer", {}), state.get("aliases", {})
    used = fit.used["optimizer"] = set()
    stepping = defaultdict[int, list[torch.optim.Optimizer]](list)
    for optimizer, group in _groups(local):
        for parameter in group["params"]:
            stepping[id(parameter)].append(optimizer)
    for optimizer, group in _groups(local):
        first_with = dict[str, str]()  # options, and the first parameter that has them
        for parameter in group["params"]:
            slot = local.slot_of(parameter)
            name = slot.saved_as
            key = name if name in all_entries else aliases.get(name, name)
            entries, optimizers = all_entries.get(key, ()), stepping[id(parameter)]
            if len(entries) == len(optimizers):
                entry = entries[optimizers.index(optimizer)]
                used.add(key)
                fit.optimizers.append((optimizer, group, parameter, entry))
                fit.wrong += _misfits(optimizer, slot.value, entry, name)
                first_with.setdefault(repr(entry["options"]), name)
            elif parameter.requires_grad or not state.get("trainable_only"):
                fit.wrong.append(f"the optimizer's state of {name} is missing")
        if len(first_with) > 1:
            first, second, *_ = first_with.values()
            fit.wrong.append(
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
    optimizer: torch.optim.Optimizer, parameter: Tensor, entry: Entry, name: str
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
    kind = type(optimizer).__name__
    if entry["kind"] != kind:
        yield (
            f"the optimizer's state of {name} is that of {entry['kind']}, and the "
            f"optimizer is {kind}"
        )


def load_optimizers(local: LocalModel, fit: Fit, pairs: Pairs) -> None:
    """Make room for the state of optimizers, and set their options."""
    for optimizer, group, parameter, entry in fit.optimizers:
        optimizer.state.pop(parameter, None)
        # many optimizers keep single numbers, as the step, on the host
        on_device = bool(group.get("capturable") or group.get("fused"))
        whole = local.slot_of(parameter).value
        for key, value in entry["state"].items():
            is_tensor = isinstance(value, Tensor)
            is_number = (
                is_tensor and value.dim() == 0 and (whole.dim() or key == "step")
            )
            if is_tensor and value.shape == whole.shape and not is_number:
                place = torch.empty_like(parameter, dtype=value.dtype).detach()
                pairs.append((value, place))
            else:
                on_host = is_number and not on_device
                device = torch.device("cpu") if on_host else parameter.device
                place = room_for(value, pairs, device)
            optimizer.state[parameter][key] = place
        for name, value in entry["options"].items():
            _set_option(group, name, value, pairs)


def _set_option(group: dict[str, Any], name: str, value: Any, pairs: Pairs) -> None:
    here = group.get(name)
    if not isinstance(here, Tensor):
        group[name] = room_for(value, pairs)
    elif isinstance(value, Tensor):  # a scheduler may have the same tensor as the group
        pairs.append((value, here))
    else:
        here.fill_(value)


def scheduler_states(local: LocalModel) -> list[dict[str, dict[str, Any]]]:
    """State of every scheduler, by stage and name; names are the same on all stages."""
    return [
        {name: scheduler.state_dict() for name, scheduler in of_stage.items()}
        for of_stage in _schedulers(local)
    ]


def merge_schedulers(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the one state of each scheduler, which all stages share, by name.

    Raises:
        RequestError: the stages do not have the same.
    """
    merged: dict[str, Any] = {}
    for of_stage in states:
        for name, state in of_stage.items():
            if repr(merged.setdefault(name, state)) != repr(state):
                raise RequestError(
                    f"the stages have {name} with different states, but a checkpoint "
                    "has one for all stages; step them together, and give every stage "
                    "the same parameter groups in the same order, empty ones too"
                )
    return merged


def _schedulers(local: LocalModel) -> Iterator[dict[str, Any]]:
    """Yield the schedulers of each stage by a name that is the same on all stages."""
    for optimizers in local.optimizers_by_stage:
        by_name, kinds = dict[str, Any](), Counter[str]()
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            of_it = [x for x in local.schedulers if x.optimizer is optimizer]
            for number, scheduler in enumerate(of_it):
                name = f"{type(scheduler).__name__} {number}"
                by_name[f"{name} of {kind} {kinds[kind]}"] = scheduler
            kinds[kind] += 1
        yield by_name


def check_schedulers(local: LocalModel, state: State, fit: Fit) -> None:
    """Find the state of every scheduler."""
    saved = state.get("schedulers", {})
    for of_stage in _schedulers(local):
        for name, scheduler in of_stage.items():
            if name not in saved:
                fit.wrong.append(f"the state of {name} is missing")
                continue
            fit.schedulers.append((scheduler, saved[name]))
            states = saved[name], scheduler.state_dict()
            n_saved, n_here = (len(x.get("_last_lr") or ()) for x in states)
            if n_saved != n_here:
                fit.wrong.append(
                    f"the state of {name} has {n_saved} parameter groups, here {n_here}"
                )
    if saved and not local.schedulers and local.optimizers:
        fit.wrong.append(
            "there is a state of schedulers, but none are attached: call "
            "pipeline.attach(*schedulers) first"
        )


def load_schedulers(fit: Fit) -> None:
    """Load the state of schedulers; the options of optimizers have been set."""
    for scheduler, state in fit.schedulers:
        scheduler.load_state_dict(deepcopy(state))
        rates = getattr(scheduler, "_last_lr", [])
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            if not group["params"]:  # no saved parameter has had its options
                _set_option(group, "lr", float(rate), [])
