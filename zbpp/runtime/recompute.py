"""Layers whose graph is not kept from F to B: B computes it again.

    F   keeps the layer's input              a non-reentrant checkpoint
    B   runs its forward again, once, then its backward
    W   holds the operands, as ever

The second run must see what the first one saw, and leave no trace. While it runs, the
random generators and the buffers (of a BatchNorm, say) are what they were in F; after
it they are what they were in B. A layer that works in place on its input is given a
copy, and hooks that it registers on its input again are not called. Other state of a
layer, as a counter in Python, changes twice.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from itertools import count

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zbpp.runtime.chunk import Chunk
from zbpp.runtime.layer_random import LayerRandom
from zbpp.runtime.state_recorder import BufferRecorder, ForwardState
from zbpp.runtime.support.marks import Mark, mark
from zbpp.runtime.support.pytree import map_tensors, tensors_in
from zbpp.runtime.support.strides import copy_of

__all__ = ["Recomputed", "recomputed_of"]


class Recomputed:
    """Runs a layer so that B computes it again.

    In its first forward it learns whether the layer changes buffers, or its input;
    then only that is copied.

    Args:
        layer: any module.
        name: of the layer, in errors.
        random: seeds the layer.
        call: what runs its forward; None: the layer itself.
    """

    def __init__(
        self,
        layer: nn.Module,
        name: str,
        random: LayerRandom,
        call: Callable[[object], object] | None = None,
    ) -> None:
        self._call = layer if call is None else call
        self._name = name
        self._random = random
        self._recorder = BufferRecorder([layer])
        self._is_first = True
        self._changes_input = False

    def __call__(self, value: object) -> object:
        """Run the forward; where no gradients are asked for, as ever.

        Raises:
            RuntimeError: the forward changes what it never changed before.
        """
        if not torch.is_grad_enabled():
            return self._call(value)
        is_tuple = type(value) is tuple
        arguments = value if isinstance(value, tuple) and is_tuple else (value,)
        state = ForwardState(self._recorder, self._random)
        output: object = checkpoint(
            partial(
                self._forward,
                is_tuple=is_tuple,
                copies=self._is_first or self._changes_input,
                runs=count(),
            ),
            *arguments,
            use_reentrant=False,
            preserve_rng_state=False,  # `ForwardState` seeds all generators
            context_fn=lambda: (nullcontext(), state),
        )
        if lost := state.buffers.lost():
            raise RuntimeError(
                f"{self._name}: {lost} was constant so far and has changed, so the "
                "layer cannot be recomputed; leave it out of recompute"
            )
        state.end()
        self._is_first = False
        return output

    def _forward(
        self, *arguments: object, is_tuple: bool, copies: bool, runs: Iterator[int]
    ) -> object:
        value: object = arguments if is_tuple else arguments[0]
        if next(runs) > 0:
            value = map_tensors(value, cache(_cut_off))
        constants = _Copies()
        if copies:
            value = map_tensors(value, constants.copy)
        before = [(tensor, mark(tensor)) for tensor in tensors_in(value)]
        output = self._call(value)
        if any(mark(tensor) != at for tensor, at in before):
            self._changes_input = True
            if not copies:
                raise RuntimeError(
                    f"{self._name} has changed its input in place, which it did not do "
                    "before, so it cannot be recomputed; let it copy its input, or "
                    "leave it out of recompute"
                )
        return map_tensors(output, constants.original) if copies else output


def recomputed_of(
    chunks: Iterable[Chunk], layers: Collection[int], random: LayerRandom
) -> dict[int, Recomputed]:
    """Return what runs these layers, by global index.

    Args:
        chunks: that hold them, and others.
        layers: global indices.
        random: seeds them.
    """
    return {
        index: Recomputed(layer, chunk.name_of(index), random, chunk.call(index))
        for chunk in chunks
        for index, layer in chunk.numbered()
        if index in layers
    }


def _cut_off(tensor: Tensor) -> Tensor:
    """Return an input for the second run, whose hooks are not those of the first.

    A layer that registers a hook on its input does so in both; the gradient passes the
    input of the first.
    """
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


class _Copies:
    """Copies of inputs, and the way back: a constant stays the same object.

    A tensor that comes twice has one copy: gradients of all its uses have one sum.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Mark, Tensor]] = {}
        self._of: dict[int, Tensor] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy, the same one for a tensor that comes twice."""
        made = self._of.get(id(tensor))
        if made is None:
            made = self._of[id(tensor)] = copy_of(tensor)
            if not tensor.requires_grad:
                self._made[id(made)] = made, mark(made), tensor
        return made

    def original(self, tensor: Tensor) -> Tensor:
        """Return what an output is a copy of, if that was not written to."""
        made, before, original = self._made.get(id(tensor), (None, None, tensor))
        return original if made is None or mark(made) == before else tensor
