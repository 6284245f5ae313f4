"""The arguments that a model's forward calls its blocks with.

Most follow from the batch: masks, rotary tables. They are computed once per process and
micro-batch, by a frame without weights, and nothing but the batch travels. Where they
do not (states of an encoder, a learned bias), their tensors travel. So does what
a block puts out for the next one beside the hidden state, as T5's bias of positions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zbpp.core import RequestError
from zbpp.models.frame import Frame, Stop
from zbpp.models.made_up import FollowsMadeUp
from zbpp.models.stand_ins import as_meta
from zbpp.runtime.support.pytree import map_tensors, tensors_in
from zbpp.runtime.support.torch_internals import outside_fake_mode

__all__ = [
    "Call",
    "Calls",
    "Plan",
    "Recorder",
    "Structure",
    "arrangement",
    "leaves",
    "outline",
    "with_handed",
    "with_leaves",
]

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
                "what the model does between two blocks must move into a block, and "
                "torch.utils.checkpoint around blocks needs use_reentrant=False"
            )
        self.hidden = args[0]
        self.calls.append((args[1:], kwargs))
        for handed in handed_in((args[1:], kwargs)):
            if handed.block != index - 1:
                raise RequestError(
                    f"block {index} is called with more of what block {handed.block} "
                    f"puts out; a pipeline hands on what block {index - 1} does"
                )
        if len(self.calls) == self._n_blocks:
            raise Stop
        return self._structure.wrap(self.hidden, index)


class Handed:
    """Stands for a tensor that a block puts out beside the hidden state.

    Args:
        block: its index.
        item: place in what it puts out.
    """

    def __init__(self, block: int, item: int) -> None:
        self.block, self.item = block, item


def handed_in(thing: Any) -> list[Handed]:
    """Return what stands for the last block's outputs in arguments, in order."""
    handed: list[Handed] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Handed):
            handed.append(leaf)
        return leaf

    map_tensors(thing, lambda t: t, note)
    return handed


def with_handed(call: Call, more: tuple[Tensor | None, ...]) -> Call:
    """Return a call with what the block before has put out."""

    def put(leaf: Any) -> Any:
        return more[leaf.item - 1] if isinstance(leaf, Handed) else leaf

    changed: Call = map_tensors(call, lambda t: t, put)
    return changed


@dataclass(frozen=True)
class Structure:
    """The output of a block: the hidden state, or a tuple that begins with it.

    Args:
        length: of the tuple; None: the bare tensor.
        tensors: places of further tensors in it.
    """

    length: int | None = None
    tensors: frozenset[int] = frozenset()

    def wrap(self, hidden: Tensor, index: int) -> Any:
        """As block ``index`` would put it out; what else is in the tuple is None."""
        if self.length is None:
            return hidden
        more = (
            Handed(index, item) if item in self.tensors else None
            for item in range(1, self.length)
        )
        return (hidden, *more)

    def unwrap(
        self, output: Any, name: str, read: frozenset[int] = frozenset()
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """The hidden state, and what else a block has put out.

        Args:
            output: the block's.
            name: of the block.
            read: places of what the blocks after it take.

        Raises:
            RequestError: it is of another structure, or holds more than that.
        """
        items = output if isinstance(output, tuple) else (output,)
        length = len(output) if isinstance(output, tuple) else None
        if length == self.length and isinstance(items[0], Tensor):
            unread = [x for i, x in enumerate(items) if i and i not in read]
            if all(item is None for item in unread):
                return items[0], items[1:]
            more = ", ".join(type(item).__name__ for item in unread)
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
    structures: list[Structure] = []

    def learn(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        twin = frame.slots()[index].__dict__["_twin"]
        args, kwargs = as_meta((args, kwargs))
        try:
            with outside_fake_mode():
                output = twin(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            output = None
        items = output if isinstance(output, tuple) else ()
        more = [i for i, item in enumerate(items) if i and isinstance(item, Tensor)]
        structures.append(Structure(len(items) or None, frozenset(more)))
        raise Stop

    with torch.no_grad():
        frame.run(batch, learn, training=False)
    return structures[0] if structures else Structure()


@dataclass
class Calls:
    """Calls of one micro-batch, and what they were found for."""

    calls: list[Call]
    read: frozenset[int]
    """Places of what blocks put out beside the hidden state, for the next one."""
    seen: tuple[Any, ...] = ()
    held: list[Tensor] = field(default_factory=list)
    """Tensors whose identity is in `seen`, kept alive."""


class Plan:
    """Finds the calls of all blocks from the batch alone.

    The last micro-batch's are kept: the blocks of a chunk ask one after another.

    Args:
        frame: without weights.
        n_blocks: their number.
        learned: what the model's blocks put out, for all its plans; empty: not known.
    """

    def __init__(self, frame: Frame, n_blocks: int, learned: list[Structure]) -> None:
        self.frame, self._n_blocks = frame, n_blocks
        self._learned = learned
        self._last: Calls | None = None

    def structure(self, batch: Any) -> Structure:
        """Of what blocks put out."""
        if not self._learned:
            self._learned.append(structure_of(self.frame, batch))
        return self._learned[0]

    def calls(self, batch: Any, device: torch.device) -> Calls:
        """Calls of the blocks, by index."""
        tensors = tensors_in(batch)
        seen = (
            *((id(tensor), tensor._version) for tensor in tensors),
            device,
            torch.is_autocast_enabled(device.type),
            torch.is_inference_mode_enabled(),
        )
        if self._last is None or self._last.seen != seen:
            self.frame.on(device)
            recorder = Recorder(self._n_blocks, self.structure(batch))
            with torch.no_grad():
                self.frame.run(batch, recorder, training=False)
            read = frozenset(handed.item for handed in handed_in(recorder.calls))
            self._last = Calls(recorder.calls, read, seen, tensors)
        return self._last

    def follows_made_up(self, batch: Any, device: torch.device) -> bool:
        """True if calls of the blocks depend on more than the batch."""
        self._last = None  # to run once more, and be followed
        followed = FollowsMadeUp(self.frame.site)
        with followed:
            calls = self.calls(batch, device).calls
        return followed.is_needed or followed.follows(calls)

    def move(self, change: Any) -> None:
        """Move what the frame holds, as `nn.Module._apply` does."""
        self.frame.apply(change)
        self._last = None


def leaves(calls: list[Call], batch: Any) -> list[Tensor]:
    """Distinct tensors among arguments, in order, but for those of the batch."""
    batch_ids = {id(tensor) for tensor in tensors_in(batch)}
    tensors = {id(t): t for t in tensors_in(calls) if id(t) not in batch_ids}
    return list(tensors.values())


def arrangement(calls: list[Call], batch: Any) -> list[str]:
    """Text of each call without values: what is a tensor, and where it is from."""
    places = {id(t): f"batch {i}" for i, t in enumerate(tensors_in(batch))}
    places |= {id(t): f"tensor {i}" for i, t in enumerate(leaves(calls, batch))}
    return [_text(call, lambda tensor: places[id(tensor)]) for call in calls]


def outline(calls: list[Call]) -> list[str]:
    """Text of each call with the same word for all tensors."""
    return [_text(call, lambda _: "a tensor") for call in calls]


def _text(call: Call, name: Callable[[Tensor], Any]) -> str:
    return repr(map_tensors(call, name, _word))


def _word(held: Any) -> str:
    if isinstance(held, Handed):
        return f"output {held.item} of block {held.block}"
    if isinstance(held, torch.dtype | torch.device):
        return str(held)
    return type(held).__qualname__


def with_leaves(
    calls: list[Call], batch: Any, values: tuple[Tensor, ...]
) -> list[Call]:
    """Return calls with other tensors in place of their leaves.

    Raises:
        RequestError: there are more or fewer.
    """
    old_leaves = leaves(calls, batch)
    if len(old_leaves) != len(values):
        raise RequestError(
            f"the blocks take {len(values)} tensors in the first layer and "
            f"{len(old_leaves)} elsewhere; arguments of blocks must not depend on "
            "values"
        )
    new = {id(old): value for old, value in zip(old_leaves, values, strict=True)}
    changed: list[Call] = map_tensors(calls, lambda t: new.get(id(t), t))
    return changed


def _words(output: Any) -> str:
    if isinstance(output, tuple):
        return f"a tuple of {len(output)}"
    return "a tensor" if isinstance(output, Tensor) else f"a {type(output).__name__}"
