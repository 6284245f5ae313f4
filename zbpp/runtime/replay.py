"""Bring a stage back to the beginning of a step, and run its forwards once more.

    random generators    torch's, Python's and numpy's global ones, by pass
    buffers              BatchNorm's running means would be updated twice
    batches              a layer, or the loss, may work in place on what it is given;
                         what other stages send needs no copy: they send it again

A replayed pass draws its numbers again, and leaves the generators as they were: what
comes next draws what it would have drawn, on all stages that share the process.
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
        self.replays = replays
        modules = [layer for _, layer in stage.numbered()]
        if stage.has_loss:
            modules += stage.loss.modules
        self._recorder = BufferRecorder(modules, small_bytes=_SMALL_BYTES)
        self._buffers: BufferSnapshot | None = None
        self._changes_batch = False
        self._forget_batch()
        self._may_rewind = self._is_rewound = False
        self._random: dict[Pass, RandomState] = {}

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
        self._random.clear()
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
        marks = [(tensor, mark(tensor)) for tensor in tensors_in(batch)]
        copies = {
            tensor: tensor.detach().clone()
            for tensor, before in marks
            if keeps
            and (self._changes_batch or tensor.nbytes <= _SMALL_BYTES or before is None)
        }
        try:
            yield
            for tensor, before in marks:
                if before is not None and mark(tensor) == before:
                    continue
                self._changes_batch |= before is not None
                if tensor in copies:  # to write to others would confuse autograd
                    self._batch_copies.append((tensor, copies[tensor]))
                elif keeps:
                    self._is_batch_lost = True
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
