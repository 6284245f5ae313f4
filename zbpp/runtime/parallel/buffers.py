"""Alternating buffers: the memory that layers of a stage are gathered and reduced in.

Two hold parameters and two gradients, each as large as the largest layer's, however
many layers there are. Nothing is allocated in a pass: a layer is gathered where it is
used, and its graph may keep views of it from F to B, as it always has the same buffer.
Gradients of each micro-batch are summed layer by layer, beside what W does next, and
added to the parts that this process keeps:

W    | layer 3 | layer 2      | layer 1      |
sums           | layer 3 in A | layer 2 in B | layer 1 in A, when 3 has been added

Parameters are gathered the same way:

gathers | layer 0 -> A | layer 1 -> B | layer 2 -> A | layer 3 -> B | ..
passes  |              | layer 0 in A | layer 1 in B | layer 2 in A | ..

Layer 2 is gathered into A once the pass of layer 0 has ended, beside that of layer 1.
Gradients go the other way: a layer's are copied into a buffer, and reduced from it.
Four conditions keep one layer from what belongs to another (the buffers and conditions
of YaFSDP, Yandex 2024):

    1  a layer is gathered only when the buffer's last pass has ended
    2  its pass begins only when its gather has ended
    3  its gradients are reduced only when all of them are in the buffer
    4  others are copied there only when that sum has ended

The host checks the order. On a GPU it needs no events: gathers and sums begin behind
what their stage's stream has been given, and the stage's stream waits for them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.runtime.parallel.progress import LayerProgress, LayerSums
from zbpp.runtime.parallel.stage import Collectives, LayerSum
from zbpp.runtime.support.collectives import noting_broken
from zbpp.runtime.support.fsdp_buffers import BufferedUnit

__all__ = [
    "AlternatingBuffers",
    "BufferedCollectives",
    "GradientTurn",
    "OrderError",
    "ParameterTurn",
    "Turn",
]


class BufferedCollectives(Collectives):
    """The collectives of a stage whose layers are gathered and reduced in buffers.

    Args:
        layers: by chunk, each wrapped as a whole.
        args: see `Collectives`.
    """

    def __init__(self, layers: Mapping[int, Sequence[LayerSum]], **args: Any) -> None:
        super().__init__(layers, **args)
        units = {
            chunk: [
                (layer.index, unit)
                for layer in of_chunk
                for unit in layer.units
                if isinstance(unit, BufferedUnit)
            ]
            for chunk, of_chunk in layers.items()
        }
        self.buffers = AlternatingBuffers(units)

    def complete(self, chunk: int) -> None:
        """All gradients of a micro-batch are there: reduce what is left of them."""
        super().complete(chunk)
        self.reduce(chunk)

    def _listener(self, chunk: int, layer_of: Mapping[Tensor, int]) -> LayerProgress:
        reduce = partial(self.reduce_layer, chunk)
        joint = partial(self.buffers.joint, reduce)
        return LayerSums(layer_of, reduce, partial(self.complete, chunk), joint)

    def rewind(self) -> None:
        """Drop all that was gathered before the step was rolled back."""
        self.buffers.forget()
        super().rewind()

    def end(self) -> None:
        """End a step or an evaluation."""
        self.buffers.end()
        super().end()


class OrderError(RuntimeError):
    """An ordering condition of alternating buffers does not hold."""

    def __init__(self, condition: int, layer: str, what: str) -> None:
        super().__init__(
            f"{layer}: {what}; condition {condition} of alternating buffers: "
            f"{_CONDITIONS[condition]}"
        )
        self.condition = condition
        self.layer = layer


_CONDITIONS = {
    1: "a layer is gathered only when the last pass in its buffer has ended",
    2: "a pass begins only when the gather of its layer has ended",
    3: "gradients are reduced only when all of them are in their buffer",
    4: "gradients are copied into a buffer only when its last sum has ended",
}


class _State(Enum):
    FREE = auto()
    FILLING = auto()
    FULL = auto()
    USED = auto()


FREE, FILLING, FULL, USED = _State


class _Turn:
    """One buffer: the layer that has it, and how far it is."""

    def __init__(self) -> None:
        self._state = FREE
        self.owner: str | None = None

    def move(
        self, layer: str, before: _State, after: _State, condition: int, what: str
    ) -> None:
        """Let a layer take its turn.

        Raises:
            OrderError: it is another one's, or not yet its.
        """
        owns = layer == self.owner or before is FREE
        if self._state is not before or not owns:
            held = self._state.name.lower()
            if self.owner is not None:
                held = f"{held}, by {self.owner}"
            raise OrderError(condition, layer, f"{what} (its buffer is {held})")
        self._state = after
        self.owner = None if after is FREE else layer


def _move(
    before: _State, after: _State, condition: int, what: str
) -> Callable[[_Turn, str], None]:
    """A method that a layer calls; out of turn it raises an `OrderError`."""

    def move(turn: _Turn, layer: str) -> None:
        turn.move(layer, before, after, condition, what)

    return move


class ParameterTurn(_Turn):
    """A buffer that parameters are gathered into.

    gather     a gather begins, on this stream
    arrived    this stream has waited for it
    begin      a pass begins
    check      it runs
    release    it has ended, with all that this stream has been given
    """

    gather = _move(FREE, FILLING, 1, "its gather begins while the buffer is in use")
    arrived = _move(FILLING, FULL, 2, "a gather ends that never began")
    begin = _move(FULL, USED, 2, "its pass begins before its gather was waited for")
    check = _move(USED, USED, 2, "its pass runs and it is not gathered")
    release = _move(USED, FREE, 2, "it is freed, and its pass has not begun")

    @property
    def is_ahead(self) -> bool:
        """A layer is gathered here, or being so, and its pass has not begun."""
        return self._state in (FILLING, FULL)

    def cancel(self) -> None:
        """Forget what was gathered ahead in vain; this stream has waited for it."""
        assert self.is_ahead
        self._state, self.owner = FREE, None


class GradientTurn(_Turn):
    """A buffer that gradients are reduced from.

    fill       gradients are copied in, on this stream
    filled     all are there, or this stream waits for them
    reduce     their sum begins, on this stream
    release    this stream has had the sum
    """

    fill = _move(FREE, FILLING, 4, "its gradients are copied over those of another")
    filled = _move(FILLING, FULL, 3, "no gradients were copied")
    reduce = _move(FULL, USED, 3, "a sum begins that lacks gradients")
    release = _move(USED, FREE, 4, "a sum ends that never began")


class AlternatingBuffers:
    """The buffers of a stage.

    Args:
        layers: of each chunk, in the order of F: numbers, and the layers that have
            parameters, each wrapped as a whole.

    Raises:
        RequestError: a layer's parameters do not lie in a buffer as they are gathered.
    """

    def __init__(
        self, layers: Mapping[int, Sequence[tuple[int, BufferedUnit]]]
    ) -> None:
        sizes = [unit.whole_bytes() for units in layers.values() for _, unit in units]
        devices = [unit.device for units in layers.values() for _, unit in units]
        device = devices[0] if devices else torch.device("cpu")
        largest = [max(kind) for kind in zip((0, 0), *sizes, strict=True)]
        self.turns: list[Turn] = []
        self._shared = _Shared()
        self._parameters, self._gradients = (
            [torch.zeros(n, dtype=torch.uint8, device=device) for _ in range(2)]
            for n in largest
        )
        turns = [(ParameterTurn(), GradientTurn()) for _ in range(2)]
        for chunk, units in layers.items():
            for place, (index, unit) in enumerate(units):
                at = place % 2
                turn = Turn(
                    index,
                    unit,
                    self._shared,
                    (self._parameters[at], self._gradients[at]),
                    *turns[at],
                )
                self.turns.append(turn)
            _chain([unit for _, unit in units], has_gradient=chunk > 0)
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
        unit: BufferedUnit,
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
        shards: Sequence[Tensor],
        group: dist.ProcessGroup,
        later: bool,
    ) -> dist.Work | None:
        """Start to gather the layer; the buffer's last owner is not in use."""
        if self._parameters.is_ahead:
            self.shared.owners[self._parameters.owner or ""].drop_ahead()
        self._parameters.gather(self.name)
        work = group.allgather_into_tensor_coalesced(list(parts), list(shards))
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
        """This stream has waited for the gather."""
        self._parameters.arrived(self.name)

    def begin(self) -> None:
        """Begin a pass."""
        self._parameters.begin(self.name)

    def release(self) -> None:
        """End a pass."""
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

    def reduce(self) -> None:
        """Start to sum the gradients."""
        if self._gradients.owner is not None:
            self.shared.owners[self._gradients.owner].finish()
        self._gradients.fill(self.name)
        self._sums.take(self.buffers[1])
        self._gradients.filled(self.name)
        self._gradients.reduce(self.name)
        self._sums.start()

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


def _chain(units: Sequence[BufferedUnit], *, has_gradient: bool) -> None:
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
