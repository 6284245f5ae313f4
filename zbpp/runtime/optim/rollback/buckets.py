"""Cut an optimizer's parameters into buckets that can be stepped one after the other.

    bucket   some MiB: small parameters together, a part of a large one by itself

A part of a parameter may stand for a parameter where the optimizer treats every number
by itself: gradient and state are cut at the same places. Parts begin at multiples of
64 numbers, as vectorized kernels treat the numbers behind the last full vector apart.
So may this process's shard of a DTensor, which is then stepped as a plain tensor.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.optim.rollback.copies import State
from zbpp.runtime.support.sharded import is_sharded, own_shard
from zbpp.runtime.support.torch_internals import is_fake

__all__ = [
    "ROW",
    "Piece",
    "cut_into_buckets",
    "treats_numbers_apart",
    "treats_parameters_apart",
]

_ELEMENTWISE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD",
)  # fmt: skip
_PER_PARAMETER = (*_ELEMENTWISE, "Adafactor", "Muon")
_BUCKET_BYTES = {"cpu": 2**22}
ROW = 64
"""Numbers; a multiple of every vector's length."""


@dataclass(frozen=True)
class Piece:
    """A parameter with a gradient, or a part of one.

    ``group`` is its group's place; ``cut`` is where the part lies in the flat
    parameter, None for all of it; ``whole`` is the DTensor whose shard ``parameter``
    is, None where it is the optimizer's own.
    """

    parameter: Tensor
    gradient: Tensor
    group: int
    cut: slice | None = None
    whole: Tensor | None = None

    @property
    def held(self) -> Tensor:
        """The optimizer's own parameter."""
        return self.parameter if self.whole is None else self.whole

    @property
    def first(self) -> bool:
        """No other piece of the parameter comes before it."""
        return self.cut is None or self.cut.start == 0

    @property
    def last(self) -> bool:
        """No other piece of the parameter comes after it."""
        return self.cut is None or self.cut.stop == self.parameter.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """The part of a tensor of the parameter's shape; shares its memory."""
        return tensor if self.cut is None else tensor.detach().view(-1)[self.cut]

    def state_in(self, held: Mapping[Tensor, State]) -> State:
        """The state that an optimizer keeps for it; of a shard, its shards."""
        if self.whole is None:
            return held.get(self.parameter, {})
        return {name: own_shard(value) for name, value in held[self.whole].items()}

    def of_state(self, state: State) -> State:
        """The state itself, or a part of it, with single numbers of its own."""
        if self.cut is None:
            return state if self.whole is None else dict(state)
        return {
            name: self.of(value) if self.is_cut_in(value) else value.clone()
            for name, value in state.items()
        }

    def is_cut_in(self, value: object) -> bool:
        """True if a part of the parameter has a part of this value."""
        same = isinstance(value, Tensor) and value.shape == self.parameter.shape
        return self.cut is not None and same


def treats_numbers_apart(optimizer: torch.optim.Optimizer) -> bool:
    """True if a step is the sum of the steps of all single numbers."""
    return _is_one_of(optimizer, _ELEMENTWISE)


def treats_parameters_apart(optimizer: torch.optim.Optimizer) -> bool:
    """True if a step is the sum of the steps of its parameters, and nothing else."""
    return _is_one_of(optimizer, _PER_PARAMETER)


def _is_one_of(optimizer: torch.optim.Optimizer, names: tuple[str, ...]) -> bool:
    return any(type(optimizer) is getattr(torch.optim, name, None) for name in names)


def cut_into_buckets(optimizer: torch.optim.Optimizer) -> Iterator[list[Piece]]:
    """All parameters that have a gradient, in order, in buckets of about one size."""
    bucket: list[Piece] = []
    room = 0
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            whole = Piece(parameter, gradient, number)
            piece = _shard(optimizer, whole) or whole
            n_bytes = piece.parameter.nbytes
            size = _BUCKET_BYTES.get(parameter.device.type, 2**28)
            if bucket and (n_bytes > room or _mixed(bucket[-1], piece)):
                yield bucket
                bucket = []
            if not bucket:
                room = size
            if n_bytes > size and _can_cut(optimizer, piece):
                yield from ([part] for part in _cut(piece, size))
            else:
                bucket.append(piece)
                room -= n_bytes
    if bucket:
        yield bucket


def _mixed(one: Piece, other: Piece) -> bool:
    """True for a DTensor beside a plain one: no step takes both at once."""
    return is_sharded(one.parameter) != is_sharded(other.parameter)


def _shard(optimizer: torch.optim.Optimizer, whole: Piece) -> Piece | None:
    """This process's shard of a DTensor, if it can be stepped by itself."""
    p: Any = whole.parameter
    g: Any = whole.gradient
    if not (is_sharded(p) and is_sharded(g) and p.placements == g.placements):
        return None
    shard = replace(
        whole, parameter=own_shard(p), gradient=own_shard(g), whole=whole.parameter
    )
    return shard if shard.parameter.numel() and _can_cut(optimizer, shard) else None


def _cut(whole: Piece, size: int) -> Iterator[Piece]:
    parameter = whole.parameter
    length = max(1, size // parameter.element_size() // ROW) * ROW
    for start in range(0, parameter.numel(), length):
        cut = slice(start, min(start + length, parameter.numel()))
        yield replace(whole, cut=cut)


def _can_cut(optimizer: torch.optim.Optimizer, whole: Piece) -> bool:
    """A first step, which makes the state, is not cut."""
    parameter, gradient = whole.parameter, whole.gradient
    if not optimizer.state.get(whole.held):
        return False
    state = whole.state_in(optimizer.state)
    return (
        treats_numbers_apart(optimizer)
        and (type(parameter) in (Tensor, nn.Parameter) or is_fake(parameter))
        and not parameter.is_complex()
        and all(_is_flat(t, parameter) for t in (parameter, gradient))
        and all(
            isinstance(value, Tensor)
            and (value.numel() == 1 or _is_flat(value, parameter))
            for value in state.values()
        )
    )


def _is_flat(tensor: Tensor, parameter: Tensor) -> bool:
    return (
        tensor.shape == parameter.shape
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
    )
