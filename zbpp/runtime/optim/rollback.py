"""Take an optimizer step that can be rolled back to the bit.

    Deferred   take     copy p; step p with a temporary copy of the state (m, v, step)
               commit   step the copy of p with the state itself
               undo     copy the copy back to p; the state has not changed
    Snapshot   take     copy p and the state; step
               commit   drop the copies
               undo     copy the copies back

`DeferredStep` keeps one copy of the parameters. It needs an optimizer that updates each
parameter independently of the others, as torch's do: then both steps give the same
bits, also for a few parameters at a time, which limits the temporary state. A private
optimizer of the same class takes both steps. `SnapshotStep` works for every optimizer.

Parameters are copied in every step: a layer may have written to them through ``.data``,
which leaves no trace. The arithmetic inverse of a step would not restore the bits.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.support.sharded import is_sharded
from zbpp.runtime.support.torch_internals import has_plain_step, plain_step

State = dict[str, Any]
"""The optimizer's state of one parameter, by name."""

_ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
_PER_PARAMETER = (*_ELEMENTWISE, "Adafactor", "Muon")
_BUCKET_BYTES = {"cpu": 2**22}
"""Parameters that are stepped together: on a CPU their state fits in the cache."""
_DEVICE_BUCKET_BYTES = 2**28


class Rollback(Protocol):
    """A speculative step: `take`, then `commit` or `undo`."""

    def take(self) -> None:
        """Step with the current gradients. If that raises, nothing has changed."""

    def commit(self) -> None:
        """Keep the step: it was valid."""

    def undo(self) -> None:
        """Restore the parameters and state before the step; may be called again."""


def copy_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of all parameter groups; tensors are copied."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def is_elementwise(optimizer: Optimizer) -> bool:
    """True if a step updates each element independently of the others."""
    return _is_one_of(optimizer, _ELEMENTWISE)


def can_defer(optimizer: Optimizer) -> bool:
    """True if `DeferredStep` can roll back a step of this optimizer."""
    return _is_one_of(optimizer, _PER_PARAMETER) and has_plain_step(optimizer)


def _is_one_of(optimizer: Optimizer, names: Sequence[str]) -> bool:
    return any(type(optimizer) is getattr(torch.optim, name, None) for name in names)


class DeferredStep:
    """Steps twice, with one copy of the parameters; needs an optimizer of torch."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._before: dict[Tensor, Tensor] = {}
        self._stepped: list[Tensor] = []
        self._buckets: list[list[Member]] = []

    @torch.no_grad()
    def take(self) -> None:
        """Step the parameters with a copy of the state."""
        self._groups = copy_groups(self._optimizer)
        self._buckets, self._stepped = list(_buckets(self._optimizer)), []
        try:
            for bucket in self._buckets:
                for p, *_ in bucket:
                    if p not in self._before:
                        self._before[p] = torch.empty_like(p, requires_grad=False)
                    self._before[p].copy_(p)
                    self._stepped.append(p)
                states = [_copy_value(self._state(p), Tensor.clone) for p, *_ in bucket]
                self._step(bucket, [p for p, *_ in bucket], states)
        except BaseException:
            self.undo()
            raise

    @torch.no_grad()
    def commit(self) -> None:
        """Step the state with the copies of the parameters."""
        for bucket in self._buckets:
            targets = [self._before[p] for p, *_ in bucket]
            states = [self._state(p) for p, *_ in bucket]
            stepped = self._step(bucket, targets, states)
            for (p, *_), target in zip(bucket, targets, strict=True):
                self._optimizer.state[p] = stepped[target]  # new in the first step
        self._buckets = []  # they refer to gradients

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the parameters."""
        self._buckets = []
        for p in self._stepped:
            p.copy_(self._before[p])

    def _state(self, p: Tensor) -> State:
        state: State = self._optimizer.state.get(p, {})
        return state

    def _step(
        self,
        bucket: Sequence["Member"],
        targets: Sequence[Tensor],
        states: Sequence[State],
    ) -> Mapping[Tensor, State]:
        """Step targets in place of a bucket's parameters; return their new state."""
        members: dict[int, list[Tensor]] = defaultdict(list)
        stepped: defaultdict[Tensor, State] = defaultdict(dict)
        for (_, gradient, group), target, state in zip(
            bucket, targets, states, strict=True
        ):
            members[group].append(target)
            target.grad = gradient
            if state:
                stepped[target] = state
        # The constructor would need parameters, and would call the class's hooks.
        shadow = object.__new__(type(self._optimizer))
        vars(shadow).update(vars(self._optimizer))
        shadow.state = stepped
        shadow.param_groups = [
            {**self._groups[number], "params": targets_of_group}
            for number, targets_of_group in members.items()
        ]
        try:
            plain_step(shadow)
        finally:
            for (p, *_), target in zip(bucket, targets, strict=True):
                if target is not p:
                    target.grad = None
        return stepped


Member = tuple[Tensor, Tensor, int]
"""A parameter with a gradient, the gradient, and the index of its group."""


def _buckets(optimizer: Optimizer) -> Iterator[list[Member]]:
    """Yield the parameters with a gradient, in order, in buckets of about one size."""
    bucket: list[Member] = []
    room = 0
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if p.grad is None:
                continue
            # torch cannot step DTensors and plain tensors together
            is_other = bool(bucket) and is_sharded(p) != is_sharded(bucket[0][0])
            if bucket and (p.nbytes > room or is_other):
                yield bucket
                bucket = []
            if not bucket:
                room = _BUCKET_BYTES.get(p.device.type, _DEVICE_BUCKET_BYTES)
            bucket.append((p, p.grad, number))
            room -= p.nbytes
    if bucket:
        yield bucket


class SnapshotStep:
    """Copies parameters, state and attributes of the optimizer until the decision."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._copies: tuple[Any, ...] = ({}, {}, {})

    @torch.no_grad()
    def take(self) -> None:
        """Copy, then step."""
        optimizer = self._optimizer
        parameters = {
            p: p.clone()
            for p in parameters_of(optimizer)
            if p.requires_grad or p.grad is not None or p in optimizer.state
        }
        attributes = {
            name: _copy_value(value, Tensor.clone)
            for name, value in vars(optimizer).items()
            if isinstance(value, bool | int | float | Tensor)
        }
        state = _copy_value(optimizer.state, Tensor.clone)
        self._copies = parameters, state, attributes
        try:
            with torch.enable_grad():
                optimizer.step()
        except BaseException:
            self.undo()
            raise

    def commit(self) -> None:
        """Drop the copies."""
        self._copies = ({}, {}, {})

    @torch.no_grad()
    def undo(self) -> None:
        """Restore everything."""
        parameters, state, attributes = self._copies
        for parameter, copied in parameters.items():
            parameter.copy_(copied)
        self._optimizer.state.clear()
        self._optimizer.state.update(state)
        vars(self._optimizer).update(attributes)


def _copy_value(value: Any, copy_tensor: Callable[[Tensor], Tensor]) -> Any:
    """Copy a value; its tensors may be nested in dicts, lists and tuples."""
    return map_tensors(value, copy_tensor, copy.copy)
