"""Bring a stage back to the beginning of a step, and run its forwards once more.

    buffers    BatchNorm's running means would be updated twice
    batches    a layer, or the loss, may work in place on what it is given; what other
               stages send needs no copy: they send it again

Random numbers need nothing: each layer is seeded (`zbpp.runtime.layer_random`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from zbpp.core import Pass
from zbpp.runtime.stage import Stage
from zbpp.runtime.state_recorder import BufferName, BufferRecorder, BufferSnapshot
from zbpp.runtime.support.marks import mark
from zbpp.runtime.support.pytree import tensors_in

__all__ = ["Replay"]

_SMALL_BYTES = 2**14
"""Of a buffer or a micro-batch: to copy it costs less than to ask."""

_NOTHING = nullcontext()


class Replay:
    """Brings a stage back to where its step began.

    Args:
        stage: whose steps are watched, from the first one on.
        replays: forwards may have to run once more, after an invalid step.
    """

    def __init__(self, stage: Stage, *, replays: bool) -> None:
        self._stage = stage
        self.replays = replays
        modules = [layer for _, layer in stage.numbered()]
        if stage.has_loss:
            modules += stage.loss.modules
        self._recorder = BufferRecorder(modules, small_bytes=_SMALL_BYTES)
        self._buffers: BufferSnapshot | None = None
        self._changes_batch = False
        self._forget_batch()
        self._may_rewind = self._is_rewound = False

    @property
    def changing(self) -> Iterable[BufferName]:
        """Buffers that forwards have changed so far."""
        return self._recorder.changing

    def begin(self, *, may_rewind: bool) -> None:
        """Begin a step.

        Args:
            may_rewind: the step before may turn out invalid.
        """
        self._buffers = self._recorder.snapshot()
        self._may_rewind, self._is_rewound = self.replays and may_rewind, False
        self._forget_batch()

    def decide(self) -> None:
        """End the part of a step that may run once more."""
        self._may_rewind = False
        self._forget_batch()

    def _forget_batch(self) -> None:
        self._batch_copies: list[tuple[Tensor, Tensor]] = []
        self._is_batch_lost = False

    def end(self) -> None:
        """End a step: learn what has changed; nothing of it will be restored."""
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            self._recorder.learn(buffers)

    def forward(self, job: Pass) -> AbstractContextManager[object]:
        """Watch a forward that runs within this, for the first or the second time."""
        if not self.replays:
            return _NOTHING
        batch = self._stage.own_batch(job.chunk, job.microbatch)
        return self._watched(batch) if batch else _NOTHING

    @contextmanager
    def _watched(self, batch: Sequence[object]) -> Iterator[None]:
        keeps = self._may_rewind and not self._is_rewound
        marks = [(tensor, mark(tensor)) for tensor in tensors_in(batch)]
        copies = {
            tensor: tensor.detach().clone()
            for tensor, before in marks
            if keeps
            and (self._changes_batch or tensor.nbytes <= _SMALL_BYTES or before is None)
        }
        yield
        for tensor, before in marks:
            if before is not None and mark(tensor) == before:
                continue
            self._changes_batch |= before is not None
            if tensor in copies:  # to write to others would confuse autograd
                self._batch_copies.append((tensor, copies[tensor]))
            elif keeps:
                self._is_batch_lost = True

    def rewind(self) -> None:
        """Make the forwards of this step so far not count.

        Raises:
            RuntimeError: one of them has changed, for the first time, what had been
                constant, so that no copy was made.
        """
        self._is_rewound = True
        self._stage.discard()
        self.restore_buffers()
        if self._is_batch_lost:
            raise RuntimeError(
                "a forward that must be replayed has changed its batch in place, which "
                "no forward did before; let the layer (or the loss) copy it first, or "
                "switch post_validation off"
            )
        with torch.no_grad():
            for tensor, copy in self._batch_copies:
                tensor.copy_(copy)

    def restore_buffers(self) -> None:
        """Restore the buffers of the step that has begun and not ended, if any.

        Raises:
            RuntimeError: one has changed and was not copied.
        """
        if self._buffers is None:
            return
        if lost := self._buffers.lost():
            raise RuntimeError(
                f"{lost} was constant so far, and has changed in a forward that must "
                "be replayed or taken back; go on from a checkpoint, and let it change "
                "in the first step too"
            )
        self._buffers.restore()
