"""Layers whose graph is not kept from F to B: B computes it again.

    F   keeps the layer's input              a non-reentrant checkpoint
    B   runs its forward again, once, then its backward
    W   holds the operands, as ever

The second run must see what the first one saw, and leave no trace. While it runs, the
random generators and the buffers (of a BatchNorm, say) are what they were in F; after
it they are what they were in B. A layer that works in place on its input is given a
copy. Other state of a layer, as a counter in Python, changes twice.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zbpp.runtime.chunk import Chunk
from zbpp.runtime.support.marks import Mark, mark
from zbpp.runtime.support.pytree import map_tensors, tensors_in
from zbpp.runtime.support.random_state import (
    drawn_from,
    random_state,
    set_random_state,
)

__all__ = ["Recomputed", "recomputed_of"]

_Buffers = list[tuple[nn.Module, dict[str, Tensor | None]]]


class Recomputed:
    """Runs a layer so that B computes it again.

    In its first forward it learns whether the layer changes buffers, or its input;
    then only that is copied.

    Args:
        layer: any module.
        name: of the layer, in errors.
        device: where it runs.
        call: what runs its forward; None: the layer itself.
    """

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        device: torch.device,
        call: Callable[[object], object] | None = None,
    ) -> None:
        self.layer = layer
        self._call = layer if call is None else call
        self.name = name
        self.device = device
        self.changing: set[tuple[nn.Module, str]] = set()
        """Buffers that a forward has changed."""
        self.is_first = True
        self._changes_input = False

    def __call__(self, value: object) -> object:
        """Run the forward; where no gradients are asked for, as ever.

        Raises:
            RuntimeError: the forward changes what it never changed before.
        """
        if not torch.is_grad_enabled():
            return self._call(value)
        is_tuple = type(value) is tuple
        given = value if isinstance(value, tuple) and is_tuple else (value,)
        seen = _Seen(self)
        output: object = checkpoint(
            partial(self._forward, is_tuple=is_tuple, copies=self._copies_input),
            *given,
            use_reentrant=False,
            preserve_rng_state=False,  # `_Seen` does, for all generators
            context_fn=lambda: (nullcontext(), seen),
        )
        seen.learn()
        self.is_first = False
        return output

    @property
    def _copies_input(self) -> bool:
        return self.is_first or self._changes_input

    def _forward(self, *given: object, is_tuple: bool, copies: bool) -> object:
        value: object = given if is_tuple else given[0]
        constants = _Copies()
        if copies:
            value = map_tensors(value, constants.copy)
        before = [(tensor, mark(tensor)) for tensor in tensors_in(value)]
        output = self._call(value)
        if any(mark(tensor) != at for tensor, at in before):
            self._changes_input = True
            if not copies:
                raise RuntimeError(
                    f"{self.name} has changed its input in place, which it did not do "
                    "before, so it cannot be recomputed; let it copy its input, or "
                    "leave it out of recompute"
                )
        return map_tensors(output, constants.original) if copies else output


def recomputed_of(
    chunks: Iterable[Chunk], layers: Collection[int], device: torch.device
) -> dict[int, Recomputed]:
    """Return what runs these layers, by global index.

    Args:
        chunks: that hold them, and others.
        layers: global indices.
        device: where they run.
    """
    return {
        index: Recomputed(layer, chunk.name_of(index), device, chunk.call(index))
        for chunk in chunks
        for index, layer in chunk.numbered()
        if index in layers
    }


class _Copies:
    """Copies of inputs, and the way back: a constant stays the same object."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Mark, Tensor]] = {}
        self._of: dict[int, Tensor] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy, the same one for a constant that comes twice."""
        if tensor.requires_grad:
            return tensor.clone()
        made = self._of.get(id(tensor))
        if made is None:
            made = self._of[id(tensor)] = tensor.clone()
            self._made[id(made)] = made, mark(made), tensor
        return made

    def original(self, tensor: Tensor) -> Tensor:
        """Return what an output is a copy of, if that was not written to."""
        made, before, original = self._made.get(id(tensor), (None, None, tensor))
        return original if made is None or mark(made) == before else tensor


class _Seen(AbstractContextManager[None]):
    """Random state and buffers as a forward sees them; within this they are back.

    Args:
        run: whose forward is about to run.
    """

    def __init__(self, run: Recomputed) -> None:
        self._run = run
        self._random = random_state(run.device)
        self._buffers = _buffers(run.layer)
        self._marks = {b: mark(b) for *_, b in _each(self._buffers)}
        self._copies = {
            buffer: buffer.detach().clone()
            for module, name, buffer in _each(self._buffers)
            if run.is_first or (module, name) in run.changing
        }
        self._undo: Callable[[], None] | None = None

    def learn(self) -> None:
        """After the forward: note what it has changed, and drop what it has not.

        Raises:
            RuntimeError: a buffer that was constant so far has changed.
        """
        run = self._run
        for module, name, buffer in _each(self._buffers):
            copy, at = self._copies.get(buffer), self._marks[buffer]
            is_marked = at is None or mark(buffer) != at
            if copy is None and is_marked:
                raise RuntimeError(
                    f"{run.name}: the buffer {name} of a {type(module).__name__} was "
                    "constant so far and has changed, so the layer cannot be "
                    "recomputed; leave it out of recompute"
                )
            if is_marked or (copy is not None and not torch.equal(copy, buffer)):
                run.changing.add((module, name))
            elif (module, name) not in run.changing:
                self._copies.pop(buffer, None)
        self._marks = {}
        self._random = drawn_from(self._random, random_state(run.device))

    def __enter__(self) -> None:
        """Bring back what the forward saw."""
        device = self._run.device
        buffers = _buffers(self._run.layer)
        values = {buffer: buffer.detach().clone() for buffer in self._copies}
        draws = any(state is not None for state in self._random)
        states = random_state(device) if draws else self._random

        def undo() -> None:
            set_random_state(states, device)
            _set_buffers(buffers, values)

        self._undo = undo
        set_random_state(self._random, device)
        _set_buffers(self._buffers, self._copies)

    def __exit__(self, *_: object) -> None:
        """Undo it, and what the second forward has done."""
        assert self._undo is not None
        self._undo()


def _buffers(layer: nn.Module) -> _Buffers:
    return [(m, dict(m._buffers)) for m in layer.modules() if m._buffers]


def _each(buffers: _Buffers) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module, held in buffers:
        for name, buffer in held.items():
            if buffer is not None:
                yield module, name, buffer


def _set_buffers(buffers: _Buffers, values: dict[Tensor, Tensor]) -> None:
    """Give modules their buffers; `.data`, as graphs that hold one must not notice."""
    for buffer, value in values.items():
        buffer.data.copy_(value)
    for module, held in buffers:
        module._buffers.clear()
        module._buffers.update(held)
