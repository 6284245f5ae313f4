"""Bring a stage back to the beginning of a step, and run its forwards once more.

    random generators    torch's, Python's and numpy's global ones, by pass
    buffers              BatchNorm's running means would be updated twice
    batches              a layer, or the loss, may work in place on what it is given

A replayed pass draws its numbers again, and leaves the generators where they were: what
comes next draws what it would have drawn, on all stages that share the process.
Generator objects of a model's own are not known here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zbpp.core import Pass
from zbpp.runtime.kept_tensors import KeptBatch, KeptBuffers
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.random_state import (
    RandomState,
    random_state,
    set_random_state,
)
from zbpp.runtime.values import Tensors

__all__ = ["Replay"]


class Replay:
    """Brings a stage back to where its step began.

    Args:
        stage: whose steps are watched, from the first one on.
        buffers: of the stage.
    """

    def __init__(self, stage: Stage, buffers: KeptBuffers) -> None:
        self._stage = stage
        self._buffers = buffers
        self._batch = KeptBatch(stage)
        self._may_rewind = self._replays = False
        self._states: dict[Pass, RandomState] = {}

    def begin(self, *, may_rewind: bool) -> None:
        """Start a step.

        Args:
            may_rewind: the step before may turn out invalid.
        """
        self._may_rewind, self._replays = may_rewind, False
        self._batch.begin()

    def decided(self) -> None:
        """End the part of a step that may be replayed: nothing is kept from now on."""
        self._may_rewind = False
        self._states.clear()
        self._batch.begin()

    def run(
        self, job: Pass, forward: Callable[[Tensors | None], Tensors], inputs: Any
    ) -> Tensors:
        """Run a forward, for the first or the second time."""
        own = self._stage.own_batch(job.chunk, job.microbatch)
        if not (own or self._may_rewind):
            return forward(inputs)
        with self.forward(job):
            return forward(inputs)

    @contextmanager
    def forward(self, job: Pass) -> Iterator[None]:
        """Within this a forward runs, for the first or the second time."""
        if not self._may_rewind:
            with self._batch.watching(job, keep=False):
                yield
            return
        now = self._random()
        if self._replays:
            self._set_random(self._states[job])
        else:
            self._states[job] = now
        try:
            with self._batch.watching(job, keep=not self._replays):
                yield
        finally:
            if self._replays:
                self._set_random(now)

    @torch.no_grad()
    def rewind(self) -> None:
        """Make the forwards so far not count.

        Raises:
            RuntimeError: one of them has changed, for the first time, what had been
                constant, so that no copy was made.
        """
        self._replays = True
        self._stage.discard()
        self._buffers.restore()
        self._batch.restore()

    def _random(self) -> RandomState:
        stage = self._stage
        return random_state(stage.device, torchs=not stage.seeded)

    def _set_random(self, state: RandomState) -> None:
        set_random_state(state, self._stage.device)
