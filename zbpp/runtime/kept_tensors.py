"""Copies of the tensors that forwards change in place, and of no others.

    first step             copy everything, and see what its forwards change
    then, in each step     copy that, and whatever is small; constants cost nothing
    changed afterwards     told by its mark: copied from the next step on

Buffers are restored when forwards are replayed after an invalid step, and when an
exception tears a step, so that a state that is saved afterwards is that of a whole
step. A large constant that changes for the first time in such a step cannot be
restored, as nobody has copied it: that ends the run, in words.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zbpp.core import Pass
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.marks import Mark, mark
from zbpp.runtime.support.pytree import tensors_in

__all__ = ["KeptBatch", "KeptBuffers"]

_Held = tuple[nn.Module, dict[str, Tensor | None]]
"""A module and its buffers as they were."""

_SMALL = 2**14
"""Bytes: to copy them costs less than to ask."""


class KeptBuffers:
    """The buffers of some layers, as they were when a step began.

    Args:
        layers: whose modules are watched.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = list(layers)
        self._held: list[_Held] = []
        self._marks: dict[Tensor, Mark] = {}
        self._copies: dict[Tensor, Tensor] = {}
        self._changing: set[tuple[nn.Module, str]] = set()
        self._is_first = True

    def begin(self) -> None:
        """Note what there is; copy what may change.

        In the first step everything is copied, and compared in the end: writes through
        ``buffer.data`` leave no mark.
        """
        modules = dict.fromkeys(m for layer in self._layers for m in layer.modules())
        held = [(m, dict(m._buffers)) for m in modules if m._buffers]
        self._marks = {buffer: mark(buffer) for _, _, buffer in _buffers_in(held)}
        self._copies = {
            buffer: buffer.detach().clone()
            for module, name, buffer in _buffers_in(held)
            if self._is_first or self._may_change(module, name, buffer)
        }
        self._held = held  # last: an interrupt may come between any two lines

    def end(self) -> None:
        """Learn what has changed in this step; nothing of it will be restored."""
        held, self._held = self._held, []
        for module, name, buffer in _buffers_in(held):
            copy = self._copies.get(buffer) if self._is_first else None
            at = self._marks[buffer]
            if mark(buffer) != at or (
                copy is not None and at is not None and not torch.equal(copy, buffer)
            ):
                self._changing.add((module, name))
        self._is_first = False
        self._marks, self._copies = {}, {}

    @torch.no_grad()
    def restore(self) -> None:
        """Give every module the buffers that it had, with their values.

        Between two steps there is nothing to restore.

        Raises:
            RuntimeError: one has changed and was not copied.
        """
        for module, name, buffer in _buffers_in(self._held):
            if buffer in self._copies:
                buffer.copy_(self._copies[buffer])
            elif mark(buffer) != self._marks[buffer]:
                raise RuntimeError(
                    f"the buffer {name} of a {type(module).__name__} was constant so "
                    "far, and has changed in a forward that must be replayed or taken "
                    "back; go on from a checkpoint, and let it change in the first "
                    "step too"
                )
        for module, buffers in self._held:
            module._buffers.clear()
            module._buffers.update(buffers)

    def _may_change(self, module: nn.Module, name: str, buffer: Tensor) -> bool:
        """True also for what leaves no marks."""
        return (
            buffer.nbytes <= _SMALL
            or self._marks[buffer] is None
            or (module, name) in self._changing
        )


def _buffers_in(held: Iterable[_Held]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module, buffers in held:
        for name, buffer in buffers.items():
            if buffer is not None:
                yield module, name, buffer


class KeptBatch:
    """The micro-batches that a stage reads itself: inputs, and targets of the loss.

    What other stages send needs no copy: in a replay they send it again.

    Args:
        stage: whose forwards are watched.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._changing = False
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._lost = False

    def begin(self) -> None:
        """Forget the copies."""
        self._copies, self._lost = [], False

    @contextmanager
    def watching(self, job: Pass, *, keep: bool) -> Iterator[None]:
        """Within this a forward runs.

        Args:
            job: the forward.
            keep: its micro-batch may be needed once more.
        """
        tensors = tensors_in(self._stage.own_batch(job.chunk, job.microbatch))
        before = [(tensor, mark(tensor)) for tensor in tensors]
        copies = {
            tensor: tensor.detach().clone()
            for tensor, at in before
            if keep and (self._changing or tensor.nbytes <= _SMALL or at is None)
        }
        yield
        for tensor, at in before:
            if at is None or mark(tensor) != at:
                self._changing |= at is not None
                if tensor in copies:  # to write to others would confuse autograd
                    self._copies.append((tensor, copies[tensor]))
                elif keep:
                    self._lost = True

    @torch.no_grad()
    def restore(self) -> None:
        """Give the batch the values that it had.

        Raises:
            RuntimeError: it has changed, for the first time, and was not copied.
        """
        if self._lost:
            raise RuntimeError(
                "a forward that must be replayed has changed its batch in place, which "
                "no forward did before; let the layer (or the loss) copy it first, or "
                "switch post_validation off"
            )
        for tensor, copy in self._copies:
            tensor.copy_(copy)
