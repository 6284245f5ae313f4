"""Bring a stage back to the beginning of a step, and run its forwards once more.

    buffers    BatchNorm's running means would be updated twice
    batches    a layer, or the loss, may work in place on what it is given; what other
               stages send needs no copy: they send it again

Both are copied in steps that may have to be replayed. Random numbers need nothing: each
layer is seeded (`zbpp.runtime.layer_random`).
"""

import torch
from torch import Tensor

from zbpp.runtime.recompute import Buffers
from zbpp.runtime.stage import Stage


class Replay:
    """Brings a stage back to where its step began."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._buffers: Buffers | None = None
        self._batch: list[tuple[Tensor, Tensor, int]] = []

    def begin(self, *, may_rewind: bool) -> None:
        """Begin a step; ``may_rewind``: the step before may turn out invalid."""
        if may_rewind:
            modules = [layer for _, layer in self._stage.numbered()]
            self._buffers = Buffers([*modules, *self._stage.loss.modules])

    def decide(self) -> None:
        """End the part of a step that may run once more."""
        self._buffers = None
        self._batch.clear()

    def before(self, chunk: int, microbatch: int) -> None:
        """A forward comes, which may run once more: copy what it reads of the batch."""
        if self._buffers is not None:
            batch = self._stage.batch_tensors(chunk, microbatch)
            self._batch += [(x, x.detach().clone(), x._version) for x in batch]

    def rewind(self) -> None:
        """Make the forwards of this step so far not count."""
        self._stage.discard()
        if self._buffers is not None:
            self._buffers.restore()
        with torch.no_grad():
            for tensor, copy, version in reversed(self._batch):  # they share memory
                if tensor._version != version:  # else graphs of others may need it
                    tensor.copy_(copy)
        self.decide()
