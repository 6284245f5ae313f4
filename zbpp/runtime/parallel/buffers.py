"""Alternating buffers: the memory that layers of a stage are gathered and reduced in.

Two hold parameters and two gradients, each as large as the largest layer's, however
many layers there are. Nothing is allocated in a pass: a layer is gathered where it is
used, and its graph may keep views of it from F to B, as it always has the same buffer.
Gradients of each micro-batch are summed layer by layer, beside what W does next, and
added to the parts that this process keeps:

W    | layer 3 | layer 2      | layer 1      |
sums           | layer 3 in A | layer 2 in B | layer 1 in A, when 3 has been added

`turns` tells the order.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.runtime.parallel.turns import GradientTurn, ParameterTurn
from zbpp.runtime.support.collectives import noting_broken
from zbpp.runtime.support.fsdp_internals import Unit

__all__ = ["AlternatingBuffers", "Turn"]


class AlternatingBuffers:
    """The buffers of a stage.

    Args:
        layers: of each chunk, in the order of F: numbers, and the layers that have
            parameters, each wrapped as a whole.

    Raises:
        RequestError: a layer's parameters do not lie in a buffer as they are gathered.
    """

    def __init__(self, layers: Mapping[int, Sequence[tuple[int, Unit]]]) -> None:
        sizes = [unit.whole_bytes() for own in layers.values() for _, unit in own]
        devices = [unit.device for own in layers.values() for _, unit in own]
        device = devices[0] if devices else torch.device("cpu")
        largest = [max(kind) for kind in zip((0, 0), *sizes, strict=True)]
        self.turns: list[Turn] = []
        self._shared = _Shared()
        self._parameters, self._gradients = (
            [torch.zeros(n, dtype=torch.uint8, device=device) for _ in range(2)]
            for n in largest
        )
        turns = [(ParameterTurn(), GradientTurn()) for _ in range(2)]
        for chunk, own in layers.items():
            for place, (index, unit) in enumerate(own):
                at = place % 2
                turn = Turn(
                    index,
                    unit,
                    self._shared,
                    (self._parameters[at], self._gradients[at]),
                    *turns[at],
                )
                self.turns.append(turn)
            _chain([unit for _, unit in own], has_gradient=chunk > 0)
        self._shared.owners = {turn.name: turn for turn in self.turns}

    @property
    def n_bytes(self) -> int:
        """Bytes of all four."""
        return sum(x.nbytes for x in (*self._parameters, *self._gradients))

    @contextmanager
    def joint(self, left: Callable[[int], object]) -> Iterator[None]:
        """Call ``left`` with each layer whose gradients a backward within this has."""
        self._shared.left = left
        try:
            yield
        finally:
            self._shared.left = None

    def forget(self) -> None:
        """Drop what was gathered ahead and is not used."""
        for turn in self.turns:
            turn.drop_ahead()

    def end(self) -> None:
        """End a step.

        Raises:
            AssertionError: a sum is under way, that nobody has added.
        """
        self.forget()
        left = [turn.name for turn in self.turns if turn.is_summing]
        assert not left, f"nobody waits for sums of {left}"


@dataclass
class _Shared:
    """The turns of a stage, by name of the layer; what hears of passes that end."""

    owners: "dict[str, Turn]" = field(default_factory=dict)
    left: Callable[[int], object] | None = None


class Turn:
    """One layer's use of its buffers.

    Args:
        index: of the layer.
        unit: the layer, wrapped.
        shared: by all turns of the stage.
        buffers: for parameters and gradients.
        parameters: turn of the former.
        gradients: of the latter.
    """

    def __init__(
        self,
        index: int,
        unit: Unit,
        shared: _Shared,
        buffers: tuple[Tensor, Tensor],
        parameters: ParameterTurn,
        gradients: GradientTurn,
    ) -> None:
        self.index = index
        self.name = f"layers.{index}"
        self.unit = unit
        self.shared = shared
        self.buffers = buffers
        self._parameters, self._gradients = parameters, gradients
        self._sums = unit.part_sums()
        unit.live_in(buffers[0], self.gather, self.begin, self.release)
        unit.reduce_by(self)
        unit.module.register_forward_pre_hook(self._check)

    def gather(
        self,
        parts: Sequence[Tensor],
        own: Sequence[Tensor],
        group: dist.ProcessGroup,
        later: bool,
    ) -> dist.Work | None:
        """Start to gather the layer; the buffer's last owner is not in use."""
        if self._parameters.is_ahead:
            self.shared.owners[self._parameters.owner or ""].drop_ahead()
        self._parameters.gather(self.name)
        work = group.allgather_into_tensor_coalesced(list(parts), list(own))
        gathering = _Gathering(work, self)
        if later:
            return gathering
        gathering.wait()
        return None

    @property
    def is_summing(self) -> bool:
        """Its gradients have been taken, and not added."""
        return self._gradients.owner == self.name

    def arrived(self) -> None:
        """The gather has been waited for."""
        self._parameters.arrived(self.name)

    def begin(self) -> None:
        """A pass begins."""
        self._parameters.begin(self.name)

    def release(self) -> None:
        """A pass has ended."""
        self._parameters.release(self.name)
        # A layer that is computed again ends a forward first, without gradients.
        if self.shared.left is not None and self._sums.has_gradients:
            self.shared.left(self.index)

    def drop_ahead(self) -> None:
        """End a gather of this layer that no pass has waited for."""
        if self._parameters.is_ahead and self._parameters.owner == self.name:
            self.unit.drop()
            if self._parameters.owner == self.name:  # torch had waited by itself
                self._parameters.cancel()

    def reduce(self) -> list[nn.Parameter]:
        """Start to sum the gradients; return the parameters that have none here."""
        if self._gradients.owner is not None:
            self.shared.owners[self._gradients.owner].finish()
        self._gradients.fill(self.name)
        unused = self._sums.take(self.buffers[1])
        self._gradients.filled(self.name)
        self._gradients.reduce(self.name)
        self._sums.start()
        return unused

    def finish(self) -> None:
        """Add the sums that were started."""
        if self.is_summing:
            self._sums.finish()
            self._gradients.release(self.name)

    def _check(self, *_: object) -> None:
        self._parameters.check(self.name)


class _Gathering(dist.Work):
    """A gather that is under way; it tells the buffer that it was waited for."""

    def __init__(self, work: dist.Work, turn: Turn) -> None:
        super().__init__()
        self._work = work
        self._turn = turn

    def wait(self, *limit: Any, **named: Any) -> bool:
        """Wait, and say so."""
        with noting_broken():
            done = self._work.wait(*limit, **named)
        self._turn.arrived()
        return bool(done)

    def is_completed(self) -> bool:
        """True if it has ended."""
        return self._work.is_completed()


def _chain(units: Sequence[Unit], *, has_gradient: bool) -> None:
    """Let each pass start the gather that the next one needs.

    Args:
        units: in the order of F.
        has_gradient: B goes on behind the first.
    """
    for i, unit in enumerate(units):
        before = units[i - 1] if i else None
        has_gradient = has_gradient or (before is not None and before.trains)
        after = units[i + 1] if i + 1 < len(units) else None
        unit.gather_ahead(after, before if has_gradient else None)
