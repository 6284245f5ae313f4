"""Times of the jobs of torch's stages, noted as those of ours are.

    forward_one_chunk, then the loss   F    on the last chunk
    backward_one_chunk                 BW, or B where W comes later
    backward_weight_one_chunk          W
    the optimizer's step               O

Nothing is noted in steps that are timed: torch's stages run through these clocks only
in steps of their own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from zbpp.bench.contender import gather
from zbpp.core import Pass, PassKind, Placement, Step, Timeline
from zbpp.diagnostics import gather_slots
from zbpp.runtime.job_times import JobTimes
from zbpp.runtime.support.torch_internals import hooked_passes

__all__ = ["PeerTimes"]

_T = TypeVar("_T")


class PeerTimes:
    """Clocks around the passes of one process."""

    def __init__(self, device: torch.device, stage: int) -> None:
        self.clock = JobTimes(device)
        self._stage = stage
        self._is_on = False

    @contextmanager
    def on(self, stages: Sequence[Any]) -> Iterator[bool]:
        """Within this, jobs are noted; False: this torch does not let us."""
        with hooked_passes(stages, self._pass) as hooked:
            self._is_on = hooked
            try:
                yield hooked
            finally:
                self._is_on = False

    def begin(self) -> None:
        """Start a step."""
        if self._is_on:
            self.clock.begin(training=True)

    def loss(self, run: Callable[[], _T]) -> _T:
        """Compute a loss; it is a part of the F before it."""
        loss = run()
        if self._is_on:
            job, start, _ = self.clock.marks[-1]
            self.clock.marks[-1] = (job, start, self.clock.now())
        return loss

    def step(self, run: Callable[[], object]) -> None:
        """Run the optimizer's step."""
        start = self.clock.now() if self._is_on else None
        run()
        if self._is_on:
            self.clock.marks.append((Step(self._stage), start, self.clock.now()))

    def timelines(
        self, n: int, *, name: str, placement: Placement, n_microbatches: int
    ) -> list[Timeline]:
        """The last steps, in seconds, oldest first (every rank must call)."""
        steps, error_s = gather_slots({self._stage: self.clock.steps(n)}, gather)
        return [
            Timeline(
                name,
                placement,
                n_microbatches,
                tuple(map(tuple, step)),
                clock_error=error_s,
            )
            for step in steps
        ]

    def _pass(
        self, stage: Any, kind: str, microbatch: int, run: Callable[[], Any]
    ) -> Any:
        start = self.clock.now()
        result = run()
        job = Pass(PassKind[kind], stage.stage_index, microbatch)
        self.clock.marks.append((job, start, self.clock.now()))
        return result
