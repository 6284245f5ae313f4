"""Take an optimizer step that can be rolled back to the bit.

    Deferred   take     copy p; step p with a temporary copy of the state (m, v, step)
               commit   step the copy of p with the state itself; it ends as p
               undo     put the copy back; the state was never touched
    Snapshot   take     copy p and the state; step
               commit   drop the copies
               undo     put the copies back

Deferred keeps one copy of the parameters, which its second step brings up to date. It
asks for an optimizer that treats every parameter by itself, as torch's do: the same
numbers come out of both steps, and of a step on a few parameters at a time, which is
all the temporary state that there is. Snapshot serves every other optimizer. Arithmetic
inverses of a step do not give the bits back, and none can take an Inf out of m.

Large parameters are stepped in parts where the optimizer treats every element by
itself; so is this process's shard of a DTensor, which torch steps faster as a plain
tensor. Both steps of Deferred are taken by a private optimizer of the same class: the
user's own never holds a stand-in.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zbpp.runtime.support.marks import Mark, mark
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.support.sharded import is_sharded, layout_of, own_shard
from zbpp.runtime.support.torch_internals import has_plain_step, is_fake, plain_step

__all__ = [
    "DeferredStep",
    "Rollback",
    "SnapshotStep",
    "can_defer",
    "copy_groups",
    "is_elementwise",
    "parameters_of",
]

State = dict[str, Any]
"""The values that an optimizer keeps for one parameter, by name."""

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
"""Of parameters that are stepped together. On CPUs the temporary state of larger ones
leaves the cache, and its pages are mapped anew in every step: a speculative step of
fused AdamW then takes 3.8 plain ones (16 MiB) or 7.6 (all at once) in place of 2.0."""
_DEVICE_BUCKET_BYTES = 2**28
_ALIGNED = 64
"""Elements; parts begin at multiples of it, as vectorized kernels round the elements
behind the last full vector otherwise."""


class Rollback(Protocol):
    """A step that is decided later: `take`, then `commit` or `undo`."""

    def take(self) -> None:
        """Step on the gradients as they are. If that raises, nothing has changed."""

    def commit(self) -> None:
        """Keep the step, which has turned out valid."""

    def undo(self) -> None:
        """Put the state before the step back; may be called more than once."""

    def forget(self) -> None:
        """Trust no copy any more, as others may write to parameters and state."""


def copy_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The values of all groups but the parameters; tensors are copied."""
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
    """True if a step treats every element of every parameter by itself."""
    return _is_one_of(optimizer, _ELEMENTWISE)


def can_defer(optimizer: Optimizer) -> bool:
    """True if `DeferredStep` can roll back a step of this optimizer."""
    return _is_one_of(optimizer, _PER_PARAMETER) and has_plain_step(optimizer)


def _is_one_of(optimizer: Optimizer, names: Sequence[str]) -> bool:
    return any(type(optimizer) is getattr(torch.optim, name, None) for name in names)


@dataclass(frozen=True)
class _Part:
    """A parameter that has a gradient, or a part of one.

    Args:
        parameter: the optimizer's own.
        gradient: of the whole parameter.
        group: place of the parameter's group.
        cut: where the part lies in this process's flat shard; None: the parameter
            is stepped as it is.
    """

    parameter: Tensor
    gradient: Tensor
    group: int
    cut: slice | None = None

    @property
    def is_last(self) -> bool:
        """True if no part of the same parameter comes after this one."""
        return self.cut is None or self.cut.stop == own_shard(self.parameter).numel()

    def view(self, tensor: Tensor) -> Tensor:
        """The part of a tensor of the parameter's shape; it shares the memory."""
        if self.cut is None:
            return tensor
        flat: Tensor = own_shard(tensor).detach().view(-1)
        return flat[self.cut]

    def state(self, held: State) -> State:
        """The part of the parameter's state, with single numbers of its own."""
        if self.cut is None:
            return held
        return {
            name: self.view(value)
            if self.has_shape(value)
            else own_shard(value).clone()
            for name, value in held.items()
        }

    def has_shape(self, value: Tensor) -> bool:
        """True if a value of the state is cut as the parameter is."""
        shard: Tensor = own_shard(value)
        parameter: Tensor = own_shard(self.parameter)
        return shard.shape == parameter.shape


class DeferredStep:
    """Steps twice, and keeps one copy of the parameters.

    Args:
        optimizer: one that `can_defer`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: list[dict[str, Any]] = []
        self._buckets: list[list[_Part]] = []
        self._copies: dict[Tensor, Tensor] = {}
        self._equal_at: dict[Tensor, Mark] = {}
        """The copy of a parameter equals it as it was at this mark."""
        self._stepped: dict[Tensor, Mark] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Step the parameters, and leave the state as it is."""
        self._groups = copy_groups(self._optimizer)
        self._buckets = list(_buckets(self._optimizer))
        self._stepped = {}
        scratch = _Scratch()
        try:
            for bucket in self._buckets:
                for part in bucket:
                    if part.parameter not in self._stepped:
                        self._copy(part.parameter)
                        self._stepped[part.parameter] = None
                states = [scratch.copy(part.state(self._held(part))) for part in bucket]
                self._step(
                    bucket, [part.view(part.parameter) for part in bucket], states
                )
                scratch.reuse()
        except BaseException:
            self.undo()
            raise
        self._stepped = {p: mark(own_shard(p)) for p in self._stepped}

    @torch.no_grad()
    def commit(self) -> None:
        """Step the state: on the old parameters, which end as the new ones."""
        for bucket in self._buckets:
            self._commit(bucket)
        self._buckets = []  # gradients live in there
        self._equal_at.update(self._stepped)

    def _commit(self, bucket: Sequence[_Part]) -> None:
        targets = [part.view(self._copies[part.parameter]) for part in bucket]
        states = [part.state(self._held(part)) for part in bucket]
        stepped = self._step(bucket, targets, states)
        for part, target in zip(bucket, targets, strict=True):
            if part.cut is None:  # a first step has made the state
                self._optimizer.state[part.parameter] = stepped[target]
            elif part.is_last:
                for name, value in self._held(part).items():
                    if not part.has_shape(value):
                        own_shard(value).copy_(stepped[target][name])

    @torch.no_grad()
    def undo(self) -> None:
        """Put the parameters back."""
        self._buckets = []
        for parameter in self._stepped:
            own_shard(parameter).copy_(own_shard(self._copies[parameter]))

    def forget(self) -> None:
        """Copy all parameters anew in the next step."""
        self._equal_at = {}

    def _held(self, part: _Part) -> State:
        held: State = self._optimizer.state.get(part.parameter, {})
        return held

    def _copy(self, parameter: Tensor) -> None:
        """Make the copy equal to the parameter, unless it is known to be."""
        at = mark(own_shard(parameter))
        if at is not None and self._equal_at.pop(parameter, None) == at:
            return
        if parameter not in self._copies:
            self._copies[parameter] = torch.empty_like(parameter, requires_grad=False)
        own_shard(self._copies[parameter]).copy_(own_shard(parameter))

    def _step(
        self,
        bucket: Sequence[_Part],
        targets: Sequence[Tensor],
        states: Sequence[State],
    ) -> Mapping[Tensor, State]:
        """Step tensors that stand for the parts; return their state after it."""
        members: dict[int, list[Tensor]] = defaultdict(list)
        held: defaultdict[Tensor, State] = defaultdict(dict)
        for part, target, state in zip(bucket, targets, states, strict=True):
            members[part.group].append(target)
            if target is not part.parameter:
                target.grad = part.view(part.gradient)
            if state:
                held[target] = state
        shadow = _shadow_of(self._optimizer)
        shadow.state = held
        shadow.param_groups = [
            {**self._groups[number], "params": group}
            for number, group in members.items()
        ]
        try:
            plain_step(shadow)
        finally:
            for part, target in zip(bucket, targets, strict=True):
                if target is not part.parameter:
                    target.grad = None
        return held


def _shadow_of(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class that gets groups and state of its own.

    Its constructor is not run: it would ask for parameters, and call its hooks.
    """
    shadow = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    return shadow


def _buckets(optimizer: Optimizer) -> Iterator[list[_Part]]:
    """All parameters that have a gradient, in order, in buckets of about one size."""
    bucket: list[_Part] = []
    room, in_dtensors = 0, False
    for part in _parts(optimizer):
        n_bytes = part.view(part.parameter).nbytes
        # a DTensor and a plain tensor cannot be stepped together
        is_dtensor = part.cut is None and is_sharded(part.parameter)
        if bucket and (n_bytes > room or is_dtensor != in_dtensors):
            yield bucket
            bucket = []
        if not bucket:
            room, in_dtensors = _bucket_bytes(part.parameter), is_dtensor
        bucket.append(part)
        room -= n_bytes
    if bucket:
        yield bucket


def _parts(optimizer: Optimizer) -> Iterator[_Part]:
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            whole = _Part(parameter, parameter.grad, number)
            shard: Tensor = own_shard(parameter)
            size = _bucket_bytes(parameter)
            is_large = shard.nbytes > size
            if (is_large or is_sharded(parameter)) and _can_cut(optimizer, whole):
                length = max(1, size // shard.element_size() // _ALIGNED) * _ALIGNED
                for start in range(0, shard.numel(), length):
                    cut = slice(start, min(start + length, shard.numel()))
                    yield replace(whole, cut=cut)
            else:
                yield whole


def _bucket_bytes(parameter: Tensor) -> int:
    return _BUCKET_BYTES.get(parameter.device.type, _DEVICE_BUCKET_BYTES)


def _can_cut(optimizer: Optimizer, whole: _Part) -> bool:
    """True if parts can be stepped; a first step, which makes the state, is not cut."""
    p: Any = whole.parameter
    g: Any = whole.gradient
    state = optimizer.state.get(p)
    if not state or not is_elementwise(optimizer) or p.is_complex():
        return False
    if is_sharded(p) and not (is_sharded(g) and p.placements == g.placements):
        return False
    shard = own_shard(p)
    return (
        shard.dim() > 0
        and shard.numel() > 0
        and (type(shard) in (Tensor, nn.Parameter) or is_fake(shard))
        and _is_flat(shard, shard.shape)
        and _is_flat(own_shard(g), shard.shape)
        and all(
            isinstance(value, Tensor)
            and (value.numel() == 1 or _is_flat(own_shard(value), shard.shape))
            for value in state.values()
        )
    )


def _is_flat(tensor: Tensor, shape: torch.Size) -> bool:
    is_dense = tensor.layout is torch.strided and tensor.is_contiguous()
    return is_dense and tensor.shape == shape


class _Scratch:
    """Temporary copies of state, whose memory the next ones use again."""

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        self._used: list[tuple[tuple[Any, ...], Tensor]] = []

    def copy(self, state: State) -> State:
        """A copy for use until `reuse`."""
        copied: State = _copy_value(state, self._copy)
        return copied

    def reuse(self) -> None:
        """Let the next copies take the memory of those so far."""
        for key, tensor in self._used:
            self._free[key].append(tensor)
        self._used = []

    def _copy(self, tensor: Tensor) -> Tensor:
        layout = tensor.shape, tensor.stride(), *layout_of(tensor)
        key = (layout, tensor.dtype, tensor.device)
        free = self._free[key]
        copied = free.pop().copy_(tensor) if free else tensor.clone()
        self._used.append((key, copied))
        return copied


class SnapshotStep:
    """Copies the parameters and all state in the step, until it is decided.

    Args:
        optimizer: its step may change its state, its groups and its attributes.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters: dict[Tensor, Tensor] = {}
        self._state: dict[Any, Any] = {}
        self._attributes: dict[str, Any] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Copy, then step."""
        optimizer = self._optimizer
        self._parameters = {
            p: p.clone()
            for p in parameters_of(optimizer)
            if p.requires_grad or p.grad is not None or p in optimizer.state
        }
        self._state = _copy_value(optimizer.state, Tensor.clone)
        self._attributes = {
            name: _copy_value(value, Tensor.clone)
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
        """Drop the copies."""
        self._parameters, self._state, self._attributes = {}, {}, {}

    @torch.no_grad()
    def undo(self) -> None:
        """Put everything back."""
        for parameter, copied in self._parameters.items():
            parameter.copy_(copied)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        vars(self._optimizer).update(self._attributes)

    def forget(self) -> None:
        """No copy outlives its step."""


def _copy_value(value: Any, copy_tensor: Callable[[Tensor], Tensor]) -> Any:
    """Copy a value in which tensors may be nested in dicts, lists and tuples."""
    return map_tensors(value, copy_tensor, copy.copy)
