"""Parameters, buffers, optimizers and LR schedulers of one process, by name.

    {"model": {"0.weight": ...}, "aliases": {"7.weight": "0.weight"},
     "optimizer": {"0.weight": [{"kind": "AdamW", "state": {"exp_avg": ...},
                                 "options": {"lr": ...}}]},
     "schedulers": {"StepLR 0 of AdamW 0": {...}}}

Names are those of the model. A parameter that several layers share is saved once, under
its first name. Several optimizers may step one parameter, hence the list. Options are
saved per parameter, as another number of stages has other groups.

`compare` finds all that does not fit before anything is changed. State is put where
the optimizer keeps it: `Optimizer.load_state_dict` casts moments to the dtype of their
parameters, and torch's `set_optimizer_state_dict` steps to make them.

All stages have the same schedulers, so there is one state of each for any number of
stages. Groups must be the same on all stages; a group may be empty.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.runtime.support.pytree import map_tensors

Place = tuple[int, str]
"""Global index of a layer, and a name in it."""

State = dict[str, Any]
"""Of a run, by its parts; see `zbpp.checkpoint.state`."""

Pairs = list[tuple[Tensor, Tensor]]
"""Tensors of a state, each with the tensor to be filled with its numbers."""

Copy = Callable[[Pairs], None]
"""Fills tensors with the numbers of those in a state."""

_OF_THE_MACHINE = ("foreach", "fused", "capturable", "differentiable")
"""Options about the way to compute: those of the present run stay."""

_MASTER = "master"
"""Of a parameter of 16 bits: that of 32 bits in host memory, next to its moments."""


@dataclass(frozen=True)
class Slot:
    """A parameter, a persistent buffer or an extra state of a module.

    ``name`` is that of the model, ``saved_as`` that of the first layer that has it:
    there ``saves`` is true. ``set_extra`` is None for tensors.
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


class LocalModel:
    """The layers, optimizers and schedulers of one process, or of a plain model.

    ``layers`` come with their global index, ``optimizers`` are by stage. ``own_name``
    gives the model's name of what a layer has under a name, ``parameter_of`` the
    parameter of a layer whose master in host memory is stepped.
    """

    def __init__(
        self,
        layers: Iterable[tuple[int, nn.Module]],
        own_name: Callable[[int, str], str],
        *,
        ties: Sequence[Sequence[Place]] = (),
        optimizers: Sequence[Sequence[torch.optim.Optimizer]] = (),
        schedulers: Sequence[Any] = (),
        parameter_of: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        self._parameter_of = parameter_of or {}
        self.optimizers, self.schedulers = optimizers, schedulers
        self.slots: list[Slot] = []
        self._slot_of: dict[int, Slot] = {}  # by the identity of a tensor
        first_of = {place: tie[0] for tie in ties for place in tie}
        for index, layer in sorted(layers, key=lambda pair: pair[0]):
            for name, value in layer.state_dict(keep_vars=True).items():
                place = index, name
                first = first_of.get(place, place)
                seen = None
                if isinstance(value, Tensor):
                    seen = self._slot_of.get(id(value))
                path, _, last = name.rpartition(".")
                is_extra = last == "_extra_state"
                slot = Slot(
                    own_name(*place),
                    seen.saved_as if seen is not None else own_name(*first),
                    value,
                    saves=seen is None and first == place,
                    set_extra=layer.get_submodule(path).set_extra_state
                    if is_extra
                    else None,
                )
                self.slots.append(slot)
                if isinstance(value, Tensor):
                    self._slot_of.setdefault(id(value), slot)

    def slot_of(self, parameter: Tensor) -> Slot:
        """The first slot of a parameter."""
        slot = self._slot_of.get(id(self._parameter_of.get(parameter, parameter)))
        if slot is None:
            raise RequestError(
                f"an optimizer steps a parameter of shape {tuple(parameter.shape)} "
                "that is in no layer of the model, so a checkpoint has no name for it"
            )
        return slot

    def stepped(
        self,
    ) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], Tensor, Slot]]:
        """Yield each optimizer, group and parameter of it, and the parameter's slot."""
        for optimizers in self.optimizers:
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        yield optimizer, group, parameter, self.slot_of(parameter)

    def named_schedulers(self) -> Iterator[tuple[str, Any]]:
        """Yield the schedulers of each stage by a name that all stages share."""
        for optimizers in self.optimizers:
            kinds = Counter[str]()
            for optimizer in optimizers:
                kind = type(optimizer).__name__
                of_it = [x for x in self.schedulers if x.optimizer is optimizer]
                for number, scheduler in enumerate(of_it):
                    name = f"{type(scheduler).__name__} {number}"
                    yield f"{name} of {kind} {kinds[kind]}", scheduler
                kinds[kind] += 1


def local_state(
    local: LocalModel, is_saved: Callable[[Slot], bool] = lambda slot: True
) -> State:
    """The state of one process; its tensors are those of the model, not copies."""
    optimizer_state = defaultdict[str, list[dict[str, Any]]](list)
    for optimizer, group, parameter, slot in local.stepped():
        if is_saved(slot):
            names = group.keys() - {"params", "param_names", *_OF_THE_MACHINE}
            state = dict(optimizer.state.get(parameter, {}))
            if parameter.dtype != slot.value.dtype:
                state[_MASTER] = parameter.detach()
            entry = {
                "kind": type(optimizer).__name__,
                "state": state,
                "options": {name: group[name] for name in group if name in names},
            }
            optimizer_state[slot.saved_as].append(entry)
    return {
        "model": {
            slot.name: x.detach() if isinstance(x := slot.value, Tensor) else x
            for slot in local.slots
            if is_saved(slot)
        },
        "optimizer": dict(optimizer_state),
        "schedulers": merge_schedulers(
            {name: scheduler.state_dict()}
            for name, scheduler in local.named_schedulers()
        ),
        "aliases": {s.name: s.saved_as for s in local.slots if s.name != s.saved_as},
    }


def merge_schedulers(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the one state of each scheduler, which all stages share, by name."""
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


@dataclass
class Loading:
    """The misfits of a state, in words, and the steps that load the rest.

    ``used`` are names in the state that this process needs, by part of the state.
    ``before`` allocates memory and adds pairs, ``after`` needs the copied numbers.
    """

    misfits: list[str] = field(default_factory=list)
    used: dict[str, set[str]] = field(default_factory=dict)
    pairs: Pairs = field(default_factory=list)
    before: list[Callable[[], object]] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)

    def run(self, copy: Copy) -> None:
        """Load a state that fits."""
        for allocate_state in self.before:
            allocate_state()
        copy(self.pairs)
        for load in self.after:
            load()


def compare(local: LocalModel, state: State, *, model_only: bool = False) -> Loading:
    """Compare a state with that of one process; nothing is changed."""
    loading = Loading()
    if not isinstance(state.get("model"), Mapping):
        loading.misfits.append(
            "this is no state of a pipeline: it has no 'model'; give what "
            "pipeline.state_dict() returns"
        )
        return loading
    _compare_model(local, state, loading)
    if not model_only:
        _compare_optimizers(local, state, loading)
        _compare_schedulers(local, state, loading)
    return loading


def _compare_model(local: LocalModel, state: State, loading: Loading) -> None:
    model, aliases = state["model"], state.get("aliases", {})
    used = loading.used["model"] = set()
    for slot in local.slots:
        # in the state the parameter may be tied otherwise than here
        names = {slot.saved_as, slot.name, aliases.get(slot.name, slot.name)}
        names &= model.keys()
        if not names:
            if slot.is_trainable or not state.get("trainable_only"):
                loading.misfits.append(f"{slot.name} is missing")
            continue
        used |= names
        saved, here = model[min(names)], slot.value
        if isinstance(here, Tensor) != isinstance(saved, Tensor):
            kind = type(saved).__name__
            loading.misfits.append(f"{slot.name} is a {kind} in the state")
        elif isinstance(saved, Tensor):
            if saved.shape != here.shape:
                loading.misfits.append(
                    f"{slot.name} has shape {tuple(saved.shape)}, the model's "
                    f"{tuple(here.shape)}"
                )
            if saved.dtype != here.dtype:
                loading.misfits.append(
                    f"{slot.name} has dtype {saved.dtype}, the model's {here.dtype}"
                )
        if slot.set_extra is not None:
            value = allocate(saved, loading.pairs)
            loading.after.append(partial(slot.set_extra, value))
        elif isinstance(saved, Tensor):
            loading.pairs.append((saved, here.detach()))


def _compare_optimizers(local: LocalModel, state: State, loading: Loading) -> None:
    all_entries, aliases = state.get("optimizer", {}), state.get("aliases", {})
    used = loading.used["optimizer"] = set()
    n_seen = Counter[int]()  # optimizers of each parameter
    n_optimizers = Counter(id(parameter) for _, _, parameter, _ in local.stepped())
    first_with: dict[int, tuple[str, str]] = {}  # of each group: name and options
    for optimizer, group, parameter, slot in local.stepped():
        name = slot.saved_as
        key = name if name in all_entries else aliases.get(name, name)
        entries, number = all_entries.get(key, ()), n_seen[id(parameter)]
        n_seen[id(parameter)] += 1
        if len(entries) != n_optimizers[id(parameter)]:
            if parameter.requires_grad or not state.get("trainable_only"):
                n_here = n_optimizers[id(parameter)]
                how = f"that of {len(entries)} optimizers, and {n_here} step it here"
                how = how if entries else "missing"
                loading.misfits.append(f"the optimizer's state of {name} is {how}")
            continue
        entry = entries[number]
        used.add(key)
        loading.misfits += _misfits(optimizer, parameter, entry, slot)
        loading.before.append(
            partial(_load_entry, optimizer, group, parameter, entry, loading.pairs)
        )
        options = repr(entry["options"])
        first, options_of_first = first_with.setdefault(id(group), (name, options))
        if options != options_of_first:
            loading.misfits.append(
                f"{first} and {name} are in one parameter group, but were saved "
                "with different options"
            )


def _misfits(
    optimizer: torch.optim.Optimizer,
    parameter: Tensor,
    entry: Mapping[str, Any],
    slot: Slot,
) -> Iterator[str]:
    name = slot.saved_as
    if (_MASTER in entry["state"]) != (parameter.dtype != slot.value.dtype):
        words = ("on", "off") if _MASTER in entry["state"] else ("off", "on")
        yield (
            f"the optimizer's state of {name}, of {slot.value.dtype}, was saved with "
            f"offload_optimizer {words[0]}, and it is {words[1]} here"
        )
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


def _load_entry(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameter: Tensor,
    entry: Mapping[str, Any],
    pairs: Pairs,
) -> None:
    """Allocate the state of a parameter, and set the options of its group."""
    optimizer.state.pop(parameter, None)
    # many optimizers keep single numbers, as the step, on the host
    on_device = bool(group.get("capturable") or group.get("fused"))
    for key, value in entry["state"].items():
        is_tensor = isinstance(value, Tensor)
        if key == _MASTER:
            pairs.append((value, parameter.detach()))
            continue
        is_step = key == "step" and is_tensor and not value.dim()
        if is_tensor and value.shape == parameter.shape and not is_step:
            target = torch.empty_like(parameter, dtype=value.dtype).detach()
            pairs.append((value, target))
        else:
            on_host = is_tensor and not value.dim() and not on_device
            device = torch.device("cpu") if on_host else parameter.device
            target = allocate(value, pairs, device)
        optimizer.state[parameter][key] = target
    for name, value in entry["options"].items():
        _set_option(group, name, value, pairs)


def _set_option(group: dict[str, Any], name: str, value: Any, pairs: Pairs) -> None:
    here = group.get(name)
    if not isinstance(here, Tensor):
        group[name] = allocate(value, pairs)
    elif isinstance(value, Tensor):  # a scheduler may have the same tensor as the group
        pairs.append((value, here))
    else:
        here.fill_(value)


def _compare_schedulers(local: LocalModel, state: State, loading: Loading) -> None:
    saved = state.get("schedulers", {})
    for name, scheduler in local.named_schedulers():
        if name not in saved:
            loading.misfits.append(f"the state of {name} is missing")
            continue
        loading.after.append(partial(_load_scheduler, scheduler, saved[name]))
        states = saved[name], scheduler.state_dict()
        n_saved, n_here = (len(x.get("_last_lr") or ()) for x in states)
        if n_saved != n_here:
            loading.misfits.append(
                f"the state of {name} has {n_saved} parameter groups, here {n_here}"
            )
    if saved and not local.schedulers and any(local.optimizers):
        loading.misfits.append(
            "there is a state of schedulers, but none are attached: call "
            "pipeline.attach(*schedulers) first"
        )


def _load_scheduler(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Load the state of a scheduler; the options of its optimizer have been set."""
    scheduler.load_state_dict(deepcopy(state))
    rates = getattr(scheduler, "_last_lr", [])
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if not group["params"]:  # no saved parameter has had its options
            _set_option(group, "lr", float(rate), [])


def allocate(value: Any, pairs: Pairs, device: torch.device | None = None) -> Any:
    """Return a value of a state with new tensors, which ``pairs`` fills.

    Without a device they are where the value's are, and on the CPU for those on meta.
    """

    def new(tensor: Tensor) -> Tensor:
        where = device or (torch.device("cpu") if tensor.is_meta else tensor.device)
        pairs.append((tensor, torch.empty_like(tensor, device=where)))
        return pairs[-1][1]

    return map_tensors(value, new)
