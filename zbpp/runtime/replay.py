"""Bring a stage back to the beginning of a step, and run its forwards once more.

    random generators    torch's, Python's and numpy's global ones, by pass
    buffers              BatchNorm's running means would be updated twice
    batches              a layer, or the loss, may work in place on what it is given

A replayed pass draws its numbers again, and leaves the generators as they were: what
comes next draws what it would have drawn, on all stages that share the process.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from zbpp.core import Pass
from zbpp.runtime.stage import Stage
from zbpp.runtime.state_recorder import BufferRecorder, BufferSnapshot
from zbpp.runtime.support.marks import Mark, mark
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.support.random_state import (
    RandomState,
    random_state,
    set_random_state,
)

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
        self._replays = replays
        layers = (layer for _, layer in stage.numbered())
        self._recorder = BufferRecorder(layers, small_bytes=_SMALL_BYTES)
        self._buffers: BufferSnapshot | None = None
        self._batch = _BatchRecorder()
        self._may_rewind = self._is_rewound = False
        self._random: dict[Pass, RandomState] = {}

    def begin(self, *, may_rewind: bool) -> None:
        """Begin a step.

        Args:
            may_rewind: the step before may turn out invalid.
        """
        self._buffers = self._recorder.snapshot()
        self._may_rewind, self._is_rewound = self._replays and may_rewind, False
        self._batch.forget()

    def decide(self) -> None:
        """End the part of a step that may run once more."""
        self._may_rewind = False
        self._random.clear()
        self._batch.forget()

    def end(self) -> None:
        """End a step: learn what has changed; nothing of it will be restored."""
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            self._recorder.learn(buffers)

    def forward(self, job: Pass) -> AbstractContextManager[object]:
        """Watch a forward that runs within this, for the first or the second time."""
        if not self._replays:
            return _NOTHING
        batch = self._stage.own_batch(job.chunk, job.microbatch)
        return self._watched(job, batch) if batch or self._may_rewind else _NOTHING

    @contextmanager
    def _watched(self, job: Pass, batch: Sequence[object]) -> Iterator[None]:
        now: RandomState | None = None
        if self._may_rewind:
            now = random_state(self._stage.device, torchs=not self._stage.seeded)
            if self._is_rewound:
                set_random_state(self._random[job], self._stage.device)
            else:
                self._random[job] = now
        keeps = self._may_rewind and not self._is_rewound
        watched = self._batch.watch(tensors_in(batch), keeps=keeps)
        try:
            yield
            self._batch.note_changes(watched)
        finally:
            if now is not None and self._is_rewound:
                set_random_state(now, self._stage.device)

    def rewind(self) -> None:
        """Make the forwards of this step so far not count.

        Raises:
            RuntimeError: one of them has changed, for the first time, what had been
                constant, so that no copy was made.
        """
        self._is_rewound = True
        self._stage.discard()
        self.restore_buffers()
        self._batch.restore()

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


class _WatchedBatch(NamedTuple):
    """The tensors of a micro-batch before its forward, and copies of some."""

    marks: Sequence[tuple[Tensor, Mark]]
    copies: dict[Tensor, Tensor]
    is_kept: bool
    """It may be needed once more."""


class _BatchRecorder:
    """The micro-batches that a stage reads itself: inputs, and targets of the loss.

    What other stages send needs no copy: in a replay they send it again.
    """

    def __init__(self) -> None:
        self._changes = False
        self.forget()

    def forget(self) -> None:
        """Forget the copies."""
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._is_lost = False

    def watch(self, tensors: Sequence[Tensor], *, keeps: bool) -> _WatchedBatch:
        """A forward is about to read a micro-batch.

        Args:
            tensors: of the micro-batch.
            keeps: it may be needed once more.
        """
        marks = [(tensor, mark(tensor)) for tensor in tensors]
        copies = {
            tensor: tensor.detach().clone()
            for tensor, before in marks
            if keeps
            and (self._changes or tensor.nbytes <= _SMALL_BYTES or before is None)
        }
        return _WatchedBatch(marks, copies, keeps)

    def note_changes(self, watched: _WatchedBatch) -> None:
        """The forward has run."""
        for tensor, before in watched.marks:
            if before is not None and mark(tensor) == before:
                continue
            self._changes |= before is not None
            if tensor in watched.copies:  # to write to others would confuse autograd
                self._copies.append((tensor, watched.copies[tensor]))
            elif watched.is_kept:
                self._is_lost = True

    @torch.no_grad()
    def restore(self) -> None:
        """Give the batch the values that it had.

        Raises:
            RuntimeError: it has changed, for the first time, and was not copied.
        """
        if self._is_lost:
            raise RuntimeError(
                "a forward that must be replayed has changed its batch in place, which "
                "no forward did before; let the layer (or the loss) copy it first, or "
                "switch post_validation off"
            )
        for tensor, copy in self._copies:
            tensor.copy_(copy)
