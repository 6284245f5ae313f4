"""From a module whose blocks are named to the layers of a pipeline."""

import copy
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from zbpp.core import RequestError
from zbpp.models.calls import Plan, Structure
from zbpp.models.discover import find_order
from zbpp.models.frame import (
    CutAt,
    Frame,
    children_on_path,
    find_blocks,
    join,
    path_modules,
    persistent,
)
from zbpp.models.layered import Layered, Tie
from zbpp.models.parts import OWN, BackLayer, BlockLayer, FrontLayer, Owned
from zbpp.models.recorded import Collector
from zbpp.models.stand_ins import meta_twin
from zbpp.models.weights import Weights
from zbpp.runtime.support.collectives import groups_kept
from zbpp.runtime.support.fsdp import is_unit, units_in
from zbpp.runtime.support.torch_internals import copying
from zbpp.runtime.ties.plan import numbers_of

__all__ = ["CutModel", "cut_module"]


@dataclass
class CutModel:
    """A model, where it is cut, and how its layers are built.

    Args:
        model: with weights, or on the meta device.
        at: where it is cut.
        weights: how weights on meta are made; None: the model has its own.
        only_front: as for `FrontLayer`.
        collector: of what joins the loss from inside blocks.
        adapt: changes each copy of a module above the blocks.
    """

    model: nn.Module
    at: CutAt
    weights: Weights | None = None
    only_front: tuple[str, ...] = ()
    collector: Collector | None = None
    adapt: Callable[[nn.Module], None] | None = None
    _twin: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        self._twin = meta_twin(self.model)
        self._learned: list[Structure] = []
        self._blocks = list(find_blocks(self.model, self.at.blocks).named_children())

    def build(self, layers: range) -> list[nn.Module]:
        """Make the layers of some indices: 0 is the front, the last one the back."""
        plan = Plan(self._frame(Owned({})), len(self._blocks), self._learned)
        return [self._layer(index, plan) for index in layers]

    def own_name(self, layer: int, name: str) -> str:
        """The model's own name of a parameter or buffer of a layer."""
        if 0 < layer <= len(self._blocks):
            key, _ = self._blocks[layer - 1]
            return f"{self.at.blocks}.{key}.{name.removeprefix('block.')}"
        return name.removeprefix(f"{OWN}.")

    def place(self, name: str) -> tuple[tuple[int, str], ...]:
        """Layers that hold a parameter of the model, with its names in them."""
        if name.startswith(f"{self.at.blocks}."):
            key, _, rest = name.removeprefix(f"{self.at.blocks}.").partition(".")
            keys = [key for key, _ in self._blocks]
            return ((keys.index(key) + 1, f"block.{rest}"),)
        places = []
        for layer, owned in ((0, self._owned(True)), (self._n - 1, self._owned(False))):
            if any(name == path or name.startswith(f"{path}.") for path in owned):
                places.append((layer, f"{OWN}.{name}"))
        return tuple(places)

    def ties(self) -> tuple[Tie, ...]:
        """Parameters that lie in several places."""
        places: dict[Hashable, list[tuple[int, str]]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            places.setdefault(numbers_of(parameter), []).extend(self.place(name))
        # within a layer its first name is enough: it is one parameter there
        firsts = [dict(reversed(occurrences)) for occurrences in places.values()]
        return tuple(tuple(sorted(f.items())) for f in firsts if len(f) > 1)

    def buffers(self) -> tuple[Tie, ...]:
        """Buffers of the modules above the blocks: the first and last layer have both.

        Those of no checkpoint are not among them.
        """
        return tuple(
            ((0, f"{OWN}.{full}"), (self._n - 1, f"{OWN}.{full}"))
            for prefix, module in path_modules(self.model, self.at.blocks)
            for key, buffer in module._buffers.items()
            if buffer is not None and key not in module._non_persistent_buffers_set
            for full in (join(prefix, key),)
        )

    def parts(self) -> dict[str, nn.Module]:
        """The modules that lie in one layer each, by name; tied ones in two."""
        children = children_on_path(self.model, self.at.blocks)
        parts = {n: m for n, m in children if n in self.at.before | self.at.after}
        blocks = ((f"{self.at.blocks}.{key}", block) for key, block in self._blocks)
        return parts | dict(blocks)

    def layered(self, **more: Any) -> Layered:
        """As a pipeline takes it."""
        return Layered(
            self._n,
            self.build,
            parts=self.parts(),
            own_name=self.own_name,
            ties=self.ties(),
            buffers=self.buffers(),
            **more,
        )

    @property
    def _n(self) -> int:
        return len(self._blocks) + 2

    def _owned(self, front: bool) -> list[str]:
        """Names of what the first or the last layer has as its own."""
        names = self.at.before if front else self.at.after
        owned = [name for name, _ in children_on_path(self.model, self.at.blocks)]
        owned = [name for name in owned if name in names]
        for prefix, module in path_modules(self.model, self.at.blocks):
            for key in module._parameters:
                full = join(prefix, key)
                if full in names or (front and full not in self.at.after):
                    owned.append(full)
        return owned

    def _layer(self, index: int, plan: Plan) -> nn.Module:
        n_blocks = len(self._blocks)
        if 0 < index <= n_blocks:
            key, block = self._blocks[index - 1]
            name = f"{self.at.blocks}.{key}"
            return BlockLayer(
                self._real(name, block),
                index - 1,
                name,
                plan,
                only_front=self.only_front,
                collector=self.collector,
            )
        names = set(self._owned(index == 0))
        children = children_on_path(self.model, self.at.blocks)
        modules = {n: self._real(n, held) for n, held in children if n in names}
        if index > 0:  # the first layer has the modules that stand in both
            modules |= {n: _twin(m) for n, m in modules.items() if n in self.at.before}
        owned = Owned(modules)
        for prefix, module in path_modules(self.model, self.at.blocks):
            for key, parameter in module._parameters.items():
                full = join(prefix, key)
                if full in names and parameter is not None:
                    if self.weights is not None:
                        parameter = self.weights.parameter(full, module, key)
                    owned.at(prefix).register_parameter(key, parameter)
        frame = self._frame(owned)
        if index == 0:
            return FrontLayer(
                owned,
                frame,
                plan,
                n_blocks=n_blocks,
                only_front=self.only_front,
            )
        if self.collector is not None:
            for slot, (_, block) in zip(frame.slots(), self._blocks, strict=True):
                kinds = [isinstance(m, self.collector.kind) for m in block.modules()]
                self.collector.add_to(slot, sum(kinds))
        return BackLayer(
            owned,
            frame,
            plan,
            n_blocks=n_blocks,
            only_front=self.only_front,
            collector=self.collector,
        )

    def _frame(self, owned: Owned) -> Frame:
        for _, module in path_modules(self.model, self.at.blocks):
            if is_unit(module):
                raise RequestError(
                    f"a {type(module).__name__} is wrapped as a whole, and its layers "
                    "lie in several stages; wrap the blocks, and what stands before "
                    "and after them, each by itself"
                )
        there = {
            name: module
            for name, module in owned.named_modules()
            if name in self.at.before | self.at.after
        }
        everywhere = {
            name: self._copy(name, child)
            for name, child in children_on_path(self.model, self.at.blocks)
            if name not in self.at.before | self.at.after
        }
        parameters = {
            prefix: owned.at(prefix)._parameters
            for prefix, _ in path_modules(self.model, self.at.blocks)
        }
        frame = Frame(
            self.model, self._twin, self.at, {**everywhere, **there}, parameters
        )
        for prefix, copied in frame.path_copies():
            home = owned.at(prefix)
            for key, buffer in copied._buffers.items():
                is_saved = key not in copied._non_persistent_buffers_set
                home.register_buffer(key, buffer, persistent=is_saved)
            # one dictionary, so that what is loaded or moved is so for both
            copied.__dict__["_buffers"] = home._buffers
        if self.weights is not None:
            for prefix, copied in frame.path_copies():
                self.weights.buffers(prefix, copied)
        if self.adapt is not None:
            for _, copied in frame.path_copies():
                self.adapt(copied)
        return frame

    def _real(self, name: str, module: nn.Module) -> nn.Module:
        return module if self.weights is None else self.weights.make(name, module)

    def _copy(self, name: str, module: nn.Module) -> nn.Module:
        """A copy of a module without parameters, which every layer may have."""
        if self.weights is not None:
            return self.weights.make(name, module).eval()
        with copying((*module.parameters(), *module.buffers())):
            return copy.deepcopy(module, groups_kept(module)).eval()


def cut_at(
    model: nn.Module,
    blocks: str,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
    example: Any = None,
) -> CutAt:
    """Say what runs before and after the blocks; what is not named is found.

    Args:
        model: of any kind.
        blocks: path of the list of blocks.
        before: children of the modules above the blocks that run before them.
        after: those that run after them.
        example: a batch, to find the order of those that are not named.

    Raises:
        RequestError: there are no such modules, or the order cannot be found.
    """
    n_blocks = len(list(find_blocks(model, blocks).children()))
    at = CutAt(blocks, frozenset(before), frozenset(after), n_blocks)
    children = dict(children_on_path(model, blocks))
    parameters = {
        join(prefix, key)
        for prefix, module in path_modules(model, blocks)
        for key in module._parameters
    }
    unknown = sorted((at.before | at.after) - children.keys() - parameters)
    if unknown:
        raise RequestError(
            f"{', '.join(unknown)}: no module beside the path to {blocks}; there are "
            f"{', '.join(children) or 'none'}"
        )
    missing = [
        name
        for name, child in children.items()
        if persistent(child) and name not in at.before | at.after
    ]
    if not missing:
        return at
    order = find_order(model, at, example, missing)
    return replace(at, before=at.before | order[0], after=at.after | order[1])


def _twin(module: nn.Module) -> nn.Module:
    """Another module with the same parameters and buffers, as ties need one a layer."""
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    twin._modules = {
        name: None if child is None else _twin(child)
        for name, child in module._modules.items()
    }
    return twin


def cut_module(
    model: nn.Module,
    blocks: str,
    *,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
    example: Any = None,
    weights: Weights | None = None,
) -> Layered:
    """Cut a module at its blocks; `zbpp.cut` explains the arguments.

    Raises:
        RequestError: the model cannot be cut so, or something has wrapped its parts.
    """
    wrapped = next(units_in(model), None)
    if wrapped is not None:  # it forbids copies, and the meta twin is one
        raise RequestError(
            f"a {type(wrapped).__name__} is wrapped by fully_shard or replicate; cut "
            "the model first, and wrap its parts then, or hand over the bare model "
            "and zbpp.DataParallel(shard=...)"
        )
    at = cut_at(model, blocks, before, after, example)
    return CutModel(model, at, weights).layered()
