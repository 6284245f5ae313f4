"""A record of what forwards change beside their outputs, to bring it back.

    who asks               what is brought back                 see
    replay after V         buffers (and batch, see `Replay`)    `BufferRecorder`
    B of recomputation     buffers, random generators           `ForwardState`

Nobody says beforehand what a forward will change. So the first one is watched with
copies of everything, and what it has changed is copied from then on. What is constant
costs a comparison of marks (`zbpp.runtime.support.marks`) and no memory; if it changes
for the first time where it has to be brought back, that ends the run, in words.

    first step             copy everything, and compare in the end: writes through
                           ``buffer.data`` leave no mark
    then, in each step     copy what has changed so far, and whatever is small

Generator objects of a model's own, and other state in Python, are not known here.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zbpp.runtime.layer_random import LayerRandom
from zbpp.runtime.support.marks import Mark, mark

__all__ = ["BufferName", "BufferRecorder", "BufferSnapshot", "ForwardState"]

BufferName = tuple[nn.Module, str]
"""A module, and the name of a buffer that it registered itself."""


@dataclass(frozen=True)
class BufferSnapshot:
    """The buffers of some modules at one moment.

    Args:
        held: each module with its buffers.
        marks: of all buffers.
        copies: of those that may change.
    """

    held: Sequence[tuple[nn.Module, dict[str, Tensor | None]]]
    marks: dict[Tensor, Mark]
    copies: dict[Tensor, Tensor]

    def named(self) -> Iterator[tuple[BufferName, Tensor]]:
        """Yield every buffer with its name."""
        for module, buffers in self.held:
            for name, buffer in buffers.items():
                if buffer is not None:
                    yield (module, name), buffer

    def changed(self, *, compares: bool = False) -> list[tuple[BufferName, Tensor]]:
        """Return the buffers that have been written to since, or may have been.

        Args:
            compares: the values of copies too, as not every write leaves a mark.
        """
        return [
            (name, buffer)
            for name, buffer in self.named()
            if self.marks[buffer] is None
            or mark(buffer) != self.marks[buffer]
            or (compares and self._has_other_values(buffer))
        ]

    def _has_other_values(self, buffer: Tensor) -> bool:
        copy = self.copies.get(buffer)
        return copy is not None and not torch.equal(copy, buffer)

    def lost(self) -> str | None:
        """Name a buffer that has changed and cannot be restored, if there is one."""
        for (module, name), buffer in self.changed():
            if buffer not in self.copies:
                return f"the buffer {name} of a {type(module).__name__}"
        return None

    def restore(self) -> None:
        """Give every module the buffers that it had, with the values of the copies.

        Through ``data``: graphs that hold a buffer must not notice.
        """
        for buffer, copy in self.copies.items():
            buffer.data.copy_(copy)
        for module, buffers in self.held:
            module._buffers.clear()
            module._buffers.update(buffers)


class BufferRecorder:
    """Learns which buffers of some layers their forwards change.

    Args:
        layers: whose modules are watched.
        small_bytes: buffers of no more are copied, whatever has been learnt.
    """

    def __init__(self, layers: Iterable[nn.Module], *, small_bytes: int = 0) -> None:
        self._layers = list(layers)
        self._small_bytes = small_bytes
        self.changing: set[BufferName] = set()
        self._is_first = True

    def snapshot(self) -> BufferSnapshot:
        """Take the buffers as they are now, with copies of those that may change."""
        snapshot = self._snapshot()
        copies = (x for name, x in snapshot.named() if self._may_change(name, x))
        snapshot.copies.update((x, x.detach().clone()) for x in copies)
        return snapshot

    def snapshot_like(self, snapshot: BufferSnapshot) -> BufferSnapshot:
        """Take the buffers as they are now, with copies of those that another has."""
        now = self._snapshot()
        now.copies.update((x, x.detach().clone()) for x in snapshot.copies)
        return now

    def _snapshot(self) -> BufferSnapshot:
        modules = dict.fromkeys(m for layer in self._layers for m in layer.modules())
        held = [
            (module, dict(module._buffers)) for module in modules if module._buffers
        ]
        every = (x for _, buffers in held for x in buffers.values() if x is not None)
        return BufferSnapshot(held, {x: mark(x) for x in every}, {})

    def learn(self, snapshot: BufferSnapshot) -> None:
        """Learn what has changed since a snapshot."""
        changed = snapshot.changed(compares=self._is_first)
        self.changing.update(name for name, _ in changed)
        self._is_first = False

    def drop_constants(self, snapshot: BufferSnapshot) -> None:
        """Drop the copies of what has never changed so far."""
        for name, buffer in snapshot.named():
            if name not in self.changing:
                snapshot.copies.pop(buffer, None)

    def _may_change(self, name: BufferName, buffer: Tensor) -> bool:
        return (
            self._is_first
            or name in self.changing
            or buffer.nbytes <= self._small_bytes
            or mark(buffer) is None
        )


class ForwardState(AbstractContextManager[None]):
    """Buffers and random generators as one forward sees them; within this, once more.

    Args:
        recorder: of the buffers.
        random: has seeded the layer.
    """

    def __init__(self, recorder: BufferRecorder, random: LayerRandom) -> None:
        self._recorder = recorder
        self._random, self._seed = random, random.latest
        self.buffers = recorder.snapshot()

    def end(self) -> None:
        """The forward has run: learn what it has changed, and keep only that."""
        self._recorder.learn(self.buffers)
        self._recorder.drop_constants(self.buffers)

    def __enter__(self) -> None:
        """Bring back what the forward saw."""
        self._buffers_now = self._recorder.snapshot_like(self.buffers)
        self._draws_again = self._random.again(self._seed)
        self._draws_again.__enter__()
        self.buffers.restore()

    def __exit__(self, *_: object) -> None:
        """Undo that, and what a second forward has changed."""
        self._draws_again.__exit__(None, None, None)
        self._buffers_now.restore()
