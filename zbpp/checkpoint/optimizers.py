"""State of torch optimizers and of their LR schedulers, by the names of parameters.

    {"0.weight": [{"kind": "AdamW", "state": {"exp_avg": ...}, "options": {"lr": ...}}]}

A list, as several optimizers may step one parameter. Options are kept per parameter:
another number of stages has other groups. State is put where the optimizer keeps it,
without a step and without a cast: `Optimizer.load_state_dict` makes moments as narrow
as their parameters, and torch's `set_optimizer_state_dict` steps to make them.

A scheduler has the groups of its optimizer, and every stage has an optimizer of its
own. What a scheduler keeps per group goes by the names of the parameters in it; all
else must be the same on all stages.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zbpp.checkpoint.model import Checked, LocalModel, State
from zbpp.checkpoint.tensors import shard_like
from zbpp.checkpoint.values import misfit

__all__ = [
    "Entry",
    "check_optimizers",
    "check_schedulers",
    "load_optimizers",
    "optimizer_state",
    "scheduler_state",
]

Entry = Mapping[str, Any]
"""State of one parameter in one optimizer: ``kind``, ``state`` and ``options``."""

_OF_THE_MACHINE = ("foreach", "fused", "capturable", "differentiable")
"""Options about the way to compute: those of the present run stay."""

_PER_GROUP = {
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
}
"""Attributes of torch's schedulers that have one value for each parameter group."""

_CHILDREN = "_schedulers"  # of those that are made of others

Groups = list[list[str]]


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
            if isinstance(group.get(name), Tensor):  # a scheduler may hold the same
                group[name].copy_(torch.as_tensor(value))
            else:
                group[name] = value.clone() if isinstance(value, Tensor) else value
    for scheduler, state in checked.schedulers:
        scheduler.load_state_dict(state)


def _placed(value: Any, parameter: Tensor, on_device: bool) -> Any:
    """A copy of a value, where and sharded as the optimizer of a parameter wants it."""
    if not isinstance(value, Tensor):
        return value
    value = shard_like(value, parameter)
    device = parameter.device if on_device or value.dim() > 0 else value.device
    return value.detach().to(device, copy=True)


def scheduler_state(local: LocalModel) -> list[dict[str, Any]]:
    """State of every scheduler, with its place among those of its optimizer."""
    return [
        {"groups": groups, "place": place, "state": scheduler.state_dict()}
        for scheduler, groups, place in _schedulers(local)
    ]


def _schedulers(local: LocalModel) -> Iterator[tuple[Any, Groups, int]]:
    places = defaultdict[int, int](int)
    for scheduler in local.schedulers:
        optimizer = scheduler.optimizer
        groups = [
            [local.slot_of(parameter).saved_as for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
        yield scheduler, groups, places[id(optimizer)]
        places[id(optimizer)] += 1


def check_schedulers(local: LocalModel, state: State, checked: Checked) -> None:
    """Find the state of every scheduler."""
    saved = state.get("schedulers", [])
    for number, (scheduler, groups, place) in enumerate(_schedulers(local)):
        where = f"the state of scheduler {number}"
        names = set[str]().union(*groups)
        parts = [
            (entry["groups"], entry["state"])
            for entry in saved
            if entry["place"] == place and names & set[str]().union(*entry["groups"])
        ]
        here = scheduler.state_dict()
        texts = [_scheduler_misfit(part, here, where) for _, part in parts]
        if not parts:
            checked.wrong.append(f"{where} is missing")
        elif any(texts):
            checked.wrong.append(next(text for text in texts if text))
        else:
            try:
                joined = _join(parts, groups, here)
            except _DifferentError:
                text = f"the states of scheduler {number} differ among the stages"
                checked.wrong.append(f"{text} that saved")
            else:
                checked.schedulers.append((scheduler, joined))
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
    text = misfit(saved, shared, where)
    children, children_here = saved.get(_CHILDREN) or [], here.get(_CHILDREN, [])
    if text is None and len(children) != len(children_here):
        return f"{where} has other schedulers in it"
    texts = [
        _scheduler_misfit(child, child_here, where)
        for child, child_here in zip(children, children_here, strict=False)
    ]
    return next((text for text in (text, *texts) if text), None)


class _DifferentError(Exception):
    """The states that stages have saved contradict each other."""


def _join(
    parts: list[tuple[Groups, dict[str, Any]]], groups: Groups, here: dict[str, Any]
) -> dict[str, Any]:
    """Make one state of those that were saved by the stages of these groups."""
    joined: dict[str, Any] = {}
    for name in parts[0][1]:
        values: list[tuple[Groups, Any]] = [
            (saved_groups, state.get(name)) for saved_groups, state in parts
        ]
        if name in _PER_GROUP and all(
            isinstance(value, list) and len(value) == len(saved_groups)
            for saved_groups, value in values
        ):
            joined[name] = [
                _common(
                    [
                        value[place]
                        for saved_groups, value in values
                        for place, names in enumerate(saved_groups)
                        if set(names) & set(group)
                    ]
                    if group
                    else [here[name][number]]
                )
                for number, group in enumerate(groups)
            ]
        elif name == _CHILDREN:
            joined[name] = [
                _join([(g, value[i]) for g, value in values], groups, child)
                for i, child in enumerate(here.get(name, ()))
            ]
        else:
            joined[name] = _common([value for _, value in values])
    return joined


def _common(values: list[Any]) -> Any:
    if not values or any(repr(value) != repr(values[0]) for value in values):
        raise _DifferentError
    return values[0]
