"""The arguments that a model's forward calls its blocks with.

Most follow from the batch: masks, rotary tables. They are computed once per process and
micro-batch, by a frame without weights, and nothing but the batch travels. Where they
do not (states of an encoder, a learned bias), their tensors travel.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zbpp.core import RequestError
from zbpp.models.frame import Frame, Stop
from zbpp.models.stand_ins import as_meta
from zbpp.runtime.support.pytree import map_tensors, tensors_in
from zbpp.runtime.support.torch_internals import outside_fake_mode

__all__ = ["Call", "Calls", "Plan", "Recorder", "leaves"]

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments after the hidden state, and keywords."""


class Recorder:
    """Notes how a forward calls its blocks, and hands the hidden state through.

    Args:
        n_blocks: their number; after the last one the forward ends.
        structure: of what a block puts out.
    """

    def __init__(self, n_blocks: int, structure: "Structure") -> None:
        self.calls: list[Call] = []
        self.hidden: Tensor | None = None
        self._n_blocks, self._structure = n_blocks, structure

    def __call__(
        self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Stand for a block.

        Raises:
            RequestError: blocks are called out of order, the first argument is not the
                hidden state, or something happens to it between two blocks.
        """
        if index != len(self.calls):
            raise RequestError(
                f"block {index} is called where block {len(self.calls)} should be; a "
                "pipeline needs blocks that run once each, in order"
            )
        if not args or not isinstance(args[0], Tensor):
            kind = type(args[0]).__name__ if args else "missing"
            raise RequestError(
                f"the first argument of block {index} is {kind}; it must be the hidden "
                "state, a tensor"
            )
        if self.hidden is not None and args[0] is not self.hidden:
            raise RequestError(
                f"block {index} is not called with what block {index - 1} puts out; "
                "what the model does between two blocks must move into a block"
            )
        self.hidden = args[0]
        self.calls.append((args[1:], kwargs))
        if len(self.calls) == self._n_blocks:
            raise Stop
        return self._structure.wrap(self.hidden)


@dataclass(frozen=True)
class Structure:
    """What a block puts out: the hidden state, or a tuple that begins with it.

    Args:
        length: of the tuple; None: the bare tensor.
    """

    length: int | None = None

    def wrap(self, hidden: Tensor) -> Any:
        """As a block would put it out; what else is in the tuple is None."""
        if self.length is None:
            return hidden
        return (hidden, *[None] * (self.length - 1))

    def unwrap(self, output: Any, name: str) -> Tensor:
        """The hidden state of what a block has put out.

        Raises:
            RequestError: it is of another structure, or holds more than that.
        """
        items = output if isinstance(output, tuple) else (output,)
        length = len(output) if isinstance(output, tuple) else None
        if length == self.length and isinstance(items[0], Tensor):
            if all(item is None for item in items[1:]):
                return items[0]
            more = ", ".join(type(item).__name__ for item in items[1:])
            raise RequestError(
                f"{name} puts out more than the hidden state ({more}), which a "
                "pipeline would lose"
            )
        raise RequestError(
            f"{name} puts out {_words(output)}; expected was "
            f"{'a tensor' if self.length is None else f'a tuple of {self.length}'}"
        )


def structure_of(frame: Frame, batch: Any) -> Structure:
    """Learn what the blocks put out, by running the first one on the meta device.

    A block that cannot run there is taken to put out a tensor; `Structure.unwrap`
    refuses it if it does not.
    """
    found: list[Structure] = []

    def learn(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        twin = frame.slots()[index].__dict__["_twin"]
        args, kwargs = as_meta((args, kwargs))
        try:
            with outside_fake_mode():
                output = twin(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            output = None
        found.append(Structure(len(output) if isinstance(output, tuple) else None))
        raise Stop

    with torch.no_grad():
        frame.run(batch, learn, training=False)
    return found[0] if found else Structure()


@dataclass
class Calls:
    """Calls of one micro-batch, and what they were found for."""

    calls: list[Call]
    seen: tuple[Any, ...] = ()
    held: list[Tensor] = field(default_factory=list)
    """Tensors whose identity is in `seen`, kept alive."""


class Plan:
    """Finds the calls of all blocks from the batch alone.

    The last micro-batch's are kept: the blocks of a chunk ask one after another.

    Args:
        frame: without weights.
        n_blocks: their number.
    """

    def __init__(self, frame: Frame, n_blocks: int) -> None:
        self.frame, self._n_blocks = frame, n_blocks
        self._structure: Structure | None = None
        self._last: Calls | None = None

    def structure(self, batch: Any) -> Structure:
        """Of what blocks put out."""
        if self._structure is None:
            self._structure = structure_of(self.frame, batch)
        return self._structure

    def calls(self, batch: Any, device: torch.device) -> list[Call]:
        """Calls of the blocks, by index.

        Args:
            batch: as the model takes it.
            device: of the hidden state.
        """
        tensors = tensors_in(batch)
        seen = (
            *((id(tensor), tensor._version) for tensor in tensors),
            *(device, torch.is_autocast_enabled(device.type)),
            torch.is_inference_mode_enabled(),
        )
        if self._last is None or self._last.seen != seen:
            self.frame.on(device)
            recorder = Recorder(self._n_blocks, self.structure(batch))
            with torch.no_grad():
                self.frame.run(batch, recorder, training=False)
            self._last = Calls(recorder.calls, seen, tensors)
        return self._last.calls

    def move(self, change: Any) -> None:
        """Move what the frame holds, as `nn.Module._apply` does."""
        self.frame.apply(change)
        self._last = None


def leaves(calls: list[Call], batch: Any) -> list[Tensor]:
    """Distinct tensors among arguments, in order, but for those of the batch."""
    known = {id(tensor) for tensor in tensors_in(batch)}
    found = {id(t): t for t in tensors_in(calls) if id(t) not in known}
    return list(found.values())


def with_leaves(
    calls: list[Call], batch: Any, values: tuple[Tensor, ...]
) -> list[Call]:
    """The same calls with other tensors in place of their leaves.

    Raises:
        RequestError: there are more or fewer.
    """
    own = leaves(calls, batch)
    if len(own) != len(values):
        raise RequestError(
            f"the blocks take {len(values)} tensors in the first layer and {len(own)} "
            "elsewhere; arguments of blocks must not depend on values"
        )
    new = {id(old): value for old, value in zip(own, values, strict=True)}
    changed: list[Call] = map_tensors(calls, lambda t: new.get(id(t), t))
    return changed


def _words(output: Any) -> str:
    if isinstance(output, tuple):
        return f"a tuple of {len(output)}"
    return "a tensor" if isinstance(output, Tensor) else f"a {type(output).__name__}"
