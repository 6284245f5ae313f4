"""Take an optimizer step that can be taken back to the bit.

    Deferred   O   copy p, step p with a temporary copy of the state (m, v, step)
               V   right: step the copy of p with the state itself, drop the result
                   wrong: copy p back; the state was never touched
    Snapshot   O   copy p and the state, step
               V   right: nothing
                   wrong: put both back

Deferred keeps one copy of the parameters and steps twice. It asks for an optimizer
that treats every parameter by itself, as torch's do: the same numbers come out of both
steps, and of a step on a few parameters at a time, which is all the temporary state
that there is. Arithmetic inverses of a step do not give the bits back, and none can
take an Inf out of m.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from zbpp.runtime.torch_private import has_plain_step, plain_step

__all__ = ["Deferred", "Rollback", "Snapshot", "can_defer"]

_PER_PARAMETER = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon",
        "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip
_BUCKET_BYTES = {"cpu": 2**22, "cuda": 2**28}
_State = dict[str, Any]


def can_defer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step is the sum of the steps of its parameters, and nothing else."""
    return type(optimizer) in _PER_PARAMETER and has_plain_step(optimizer)


class Rollback(Protocol):
    """An early step: `speculate`, then one of the others."""

    def speculate(self) -> None:
        """Step on the gradients as they are."""

    def commit(self) -> None:
        """The step was right."""

    def undo(self) -> None:
        """The step was wrong; may be called more than once."""


class _Copies:
    """A copy of each parameter that has a gradient; memory is taken once."""

    def __init__(self) -> None:
        self._of: dict[Tensor, Tensor] = {}
        self.live: list[Tensor] = []

    def take(self, parameter: Tensor) -> None:
        if parameter not in self._of:
            self._of[parameter] = torch.empty_like(parameter, requires_grad=False)
        self._of[parameter].copy_(parameter)
        self.live.append(parameter)

    def give_back(self) -> None:
        for parameter in self.live:
            parameter.copy_(self._of[parameter])

    def of(self, parameter: Tensor) -> Tensor:
        return self._of[parameter]


class Deferred:
    """One more copy of the parameters; the step is computed twice.

    Args:
        optimizer: one that `can_defer`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._copies = _Copies()
        self._values: list[_State] = []

    @torch.no_grad()
    def speculate(self) -> None:
        """Step, with the state left as it is."""
        self._copies.live = []
        self._values = [
            {name: _clone(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        scratch = _Scratch()
        try:
            for bucket in self._buckets():
                for parameter in bucket:
                    self._copies.take(parameter)
                state = {p: scratch.copy(self._optimizer.state.get(p)) for p in bucket}
                self._step({p: p for p in bucket}, state)
                scratch.reuse()
        except BaseException:
            self.undo()  # as if the step had been left to V
            raise

    @torch.no_grad()
    def commit(self) -> None:
        """Step the state: on the old parameters, which end as the new ones."""
        real = self._optimizer.state
        twins = {p: self._copies.of(p) for p in self._copies.live}
        for parameter, twin in twins.items():
            twin.grad = parameter.grad
        state = {twin: real[p] for p, twin in twins.items() if p in real}
        stepped = self._step(twins, state)
        for parameter, twin in twins.items():
            real[parameter] = stepped[twin]
            twin.grad = None

    @torch.no_grad()
    def undo(self) -> None:
        """Put the parameters back; the state was never touched."""
        self._copies.give_back()

    def _step(
        self, parameters: Mapping[Tensor, Tensor], state: Mapping[Tensor, _State]
    ) -> Mapping[Tensor, _State]:
        """Step stand-ins of some parameters, with a state of their own."""
        optimizer = self._optimizer
        groups, held = optimizer.param_groups, optimizer.state
        optimizer.param_groups = [
            {**values, "params": [parameters[p] for p in own]}
            for group, values in zip(groups, self._values, strict=False)
            if (own := [p for p in group["params"] if p in parameters])
        ]
        optimizer.state = used = defaultdict(dict, state)
        try:
            plain_step(optimizer)
        finally:
            optimizer.param_groups, optimizer.state = groups, held
        return used

    def _buckets(self) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        room = 0
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if bucket and parameter.nbytes > room:
                    yield bucket
                    bucket = []
                if not bucket:
                    room = _BUCKET_BYTES.get(parameter.device.type, 2**28)
                bucket.append(parameter)
                room -= parameter.nbytes
        if bucket:
            yield bucket


class _Scratch:
    """Temporary copies of state, whose memory the next bucket uses again."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        self._used: list[tuple[tuple[Any, ...], Tensor]] = []

    def copy(self, state: _State | None) -> _State:
        return {name: self._copy(value) for name, value in (state or {}).items()}

    def reuse(self) -> None:
        for key, tensor in self._used:
            self._free[key].append(tensor)
        self._used = []

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return _clone(value)
        key = (value.shape, value.stride(), value.dtype, value.device)
        free = self._free[key]
        kept = free.pop().copy_(value) if free else value.clone()
        self._used.append((key, kept))
        return kept


class Snapshot:
    """A copy of the parameters and of all state: for any optimizer.

    Args:
        optimizer: its early step may change its state, its groups and its parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._copies = _Copies()
        self._state: dict[Any, Any] = {}
        self._plain: dict[str, Any] = {}

    @torch.no_grad()
    def speculate(self) -> None:
        """Copy everything, then step."""
        optimizer = self._optimizer
        self._copies.live = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._copies.take(parameter)
        self._state = {key: _clone(value) for key, value in optimizer.state.items()}
        self._plain = {
            name: _clone(value)
            for name, value in vars(optimizer).items()
            if isinstance(value, bool | int | float | Tensor)
        }
        try:
            with torch.enable_grad():
                optimizer.step()
        except BaseException:
            self.undo()
            raise

    def commit(self) -> None:
        """Drop the copy of the state."""
        self._state = {}

    @torch.no_grad()
    def undo(self) -> None:
        """Put everything back."""
        self._copies.give_back()
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        vars(self._optimizer).update(self._plain)


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _clone(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_clone(item) for item in value)
    return copy.copy(value)
