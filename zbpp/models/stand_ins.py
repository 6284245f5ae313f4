"""Modules that stand where a layer has none of the model's own.

    `Absent`    a module that runs before the blocks: gives outputs of the right shape
    `Missing`   a module that must not be called here
    `Slot`      a block: hands the call to whoever runs the frame

Their attributes are those of a twin of the module on the meta device, which holds no
memory: a model may ask a module for its dtype, or a block for its kind of attention.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zbpp.core import RequestError
from zbpp.runtime.support.collectives import groups_kept
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.support.torch_internals import outside_fake_mode

__all__ = [
    "MOST_SHAPES",
    "Absent",
    "Handler",
    "Missing",
    "SaysYes",
    "Site",
    "Slot",
    "as_meta",
    "full",
    "look",
    "meta_twin",
    "slim",
]

MOST_SHAPES = 64
"""Shapes of batches that are remembered."""

Handler = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""Called in place of block i with its arguments; gives what the block would."""


def meta_twin(module: nn.Module) -> nn.Module:
    """Copy a module without its weights: parameters and buffers are on meta."""
    memo = groups_kept(module)
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = empty
    twin = copy.deepcopy(module, memo)
    for part in twin.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return twin.eval()


class Site:
    """The run of a frame that stand-ins serve: its handler of blocks, its device."""

    def __init__(self) -> None:
        self.handler: Handler | None = None
        self.device = torch.device("cpu")
        self.made: dict[int, Tensor] = {}
        """Outputs of absent modules in this run, by identity."""
        self.absent: dict[int, Tensor] = {}
        """Stand-ins of absent parameters, by identity."""
        self.has_assumed = False
        """An absent module of this run has asked for a value, and got an answer."""

    def is_made_up(self, tensor: Tensor) -> bool:
        """True for a tensor without the model's values, whatever its own are."""
        return id(tensor) in self.made or id(tensor) in self.absent


def as_meta(thing: Any) -> Any:
    """Return a thing with its tensors on the meta device, also fake ones."""
    with outside_fake_mode():
        return map_tensors(
            thing, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta")
        )


class _StandIn(nn.Module):
    """A module with the attributes of a twin, and without parameters."""

    def __init__(self, name: str, twin: nn.Module, site: Site) -> None:
        super().__init__()
        self.__dict__.update(_name=name, _twin=twin, _site=site)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_StandIn":
        """A copy with the same twin, which nothing changes."""
        copied: _StandIn = object.__new__(type(self))
        memo[id(self)] = copied
        state = {key: held for key, held in vars(self).items() if key != "_twin"}
        copied.__dict__.update(copy.deepcopy(state, memo), _twin=vars(self)["_twin"])
        return copied

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_twin"], name)


class Absent(_StandIn):
    """Stands for a module that runs before the blocks, in a layer that is not first.

    Floats in its outputs are not numbers: if what runs after the blocks used them, the
    loss would show it. Shapes that were asked for before are remembered.
    """

    def __init__(self, name: str, twin: nn.Module, site: Site) -> None:
        super().__init__(name, twin, site)
        self.__dict__["_known"] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs of the shapes and dtypes that the module would give.

        Raises:
            RequestError: these depend on values.
        """
        asked = look(args, kwargs)
        if asked in self._known:
            output, assumes = self._known[asked]
            self._site.has_assumed |= assumes
            return map_tensors(output, self._real)
        args, kwargs = as_meta((args, kwargs))
        try:
            with torch.no_grad(), outside_fake_mode(), SaysYes() as answers:
                output = self._twin(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise RequestError(
                f"the shapes that {self._name} puts out cannot be told from those it "
                f"takes in: {error}; name it in neither before= nor after= if all "
                "layers may have it, or cut the model yourself"
            ) from error
        if asked is not None:
            if len(self._known) == MOST_SHAPES:
                self._known.clear()
            self._known[asked] = output, answers.has_answered
        self._site.has_assumed |= answers.has_answered
        return map_tensors(output, self._real)

    def _real(self, tensor: Tensor) -> Tensor:
        fill = float("nan") if tensor.dtype.is_floating_point else 0
        made = torch.full(
            tensor.shape, fill, dtype=tensor.dtype, device=self._site.device
        )
        self._site.made[id(made)] = made
        return made


def look(*arguments: Any) -> str | None:
    """Text of arguments with shapes for tensors; None if it does not tell all."""
    unknown: list[Any] = []

    def shape(tensor: Tensor) -> Any:
        return tuple(tensor.shape), tensor.dtype

    text = repr(map_tensors(arguments, shape, unknown.append))
    return None if unknown else text


class SaysYes(TorchFunctionMode):
    """Answers yes where a module on meta asks whether something holds of values.

    An encoder asks so whether its mask leaves nothing out. As its outputs may depend on
    the answer, the first layer lets the arguments of blocks travel where one was given.
    """

    has_answered = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, but for the question."""
        if function is Tensor.__bool__ and args[0].is_meta:
            self.has_answered = True
            return True
        return function(*args, **(kwargs or {}))


class Missing(_StandIn):
    """Stands for a module that another layer has."""

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse.

        Raises:
            RequestError: always.
        """
        raise RequestError(
            f"{self._name} was called where the model's layers do not have it; name it "
            "in before= if it runs before the blocks, in after= if it runs after them, "
            "in both if it does both"
        )


class Slot(_StandIn):
    """Stands for a block."""

    def __init__(self, index: int, name: str, twin: nn.Module, site: Site) -> None:
        super().__init__(name, twin, site)
        self.__dict__["_index"] = index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the call to the frame's run."""
        assert self._site.handler is not None, "a frame runs with a handler"
        return self._site.handler(self._index, args, kwargs)


def slim(batch: Any, only_front: tuple[str, ...]) -> Any:
    """Return the batch with empty tensors, a dimension more, for what stays here."""
    if not isinstance(batch, dict) or not only_front:
        return batch
    return {
        key: t.new_empty((0, *t.shape)) if key in only_front else t
        for key, t in batch.items()
    }


def full(batch: Any, only_front: tuple[str, ...]) -> Any:
    """Return the batch with tensors on meta for what has not travelled."""
    if not isinstance(batch, dict) or not only_front:
        return batch
    return {
        key: torch.empty(t.shape[1:], dtype=t.dtype, device="meta")
        if key in only_front
        else t
        for key, t in batch.items()
    }
