"""What forwards change beside their outputs: buffers, and the random generators.

Forwards before a V may have to run once more, and must then find both as they were:
BatchNorm's running means would be updated twice, dropout would draw other numbers.
A repeated pass draws its numbers again, and leaves the generator where it was: what
comes next draws what it would have drawn, on all stages that share the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zbpp.core import Pass
from zbpp.runtime.stage import Stage

__all__ = ["Replay"]

_Random = tuple[Tensor, Tensor | None]


class Replay:
    """Brings a stage back to where its step began.

    Args:
        stage: at the beginning of a step.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._states: dict[Pass, _Random] = {}
        self._repeats = False
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in _modules(stage)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @contextmanager
    def random_numbers_of(self, job: Pass) -> Iterator[None]:
        """Within this a forward runs, for the first or the second time."""
        if self._stage.seeded:
            yield
            return
        now = self._random()
        if not self._repeats:
            self._states[job] = now
            yield
            return
        self._set_random(self._states[job])
        try:
            yield
        finally:
            self._set_random(now)

    @torch.no_grad()
    def rewind(self) -> None:
        """The forwards so far did not count."""
        self._repeats = True
        self._stage.discard()
        for module, name, buffer, value in self._buffers:
            buffer.copy_(value)
            module._buffers[name] = buffer

    def _random(self) -> _Random:
        device = self._stage.device
        on_gpu = device.type == "cuda"
        return (
            torch.get_rng_state(),
            torch.cuda.get_rng_state(device) if on_gpu else None,
        )

    def _set_random(self, state: _Random) -> None:
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self._stage.device)


def _modules(stage: Stage) -> list[nn.Module]:
    """Each one once, also if layers share it."""
    return list(
        dict.fromkeys(
            module for _, layer in stage.numbered() for module in layer.modules()
        )
    )
