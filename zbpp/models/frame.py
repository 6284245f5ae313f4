"""A model's own forward around its blocks, with other things in place of the blocks.

    front   embeddings | slots            notes what the blocks are called with
    plan    stand-ins  | slots            the same, without any weights
    back    stand-ins  | slots | head     the last slot gives the real hidden state

Nothing is traced, and no forward is written again: masks, rotary tables, scales, the
head and the loss are the model's own code. The frame is a shallow copy of the modules
on the path to the blocks.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from zbpp.core import RequestError
from zbpp.models.stand_ins import Absent, Handler, Missing, Site, Slot

__all__ = [
    "CutAt",
    "Frame",
    "Stop",
    "children_on_path",
    "find_blocks",
    "join",
    "path_modules",
    "persistent",
]


class Stop(BaseException):
    """Ends a forward whose rest is not wanted; no error."""


@dataclass(frozen=True)
class CutAt:
    """Places at which a model is cut.

    Args:
        blocks: path of the list of blocks.
        before: names of modules that run before the first block.
        after: names of modules that run after the last one.
        n_blocks: their number.
    """

    blocks: str
    before: frozenset[str]
    after: frozenset[str]
    n_blocks: int


def path_modules(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules above a path, with their names: the model first, named ""."""
    module, name = model, ""
    yield name, module
    for part in path.split(".")[:-1]:
        module, name = getattr(module, part), join(name, part)
        yield name, module


def children_on_path(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of `path_modules` that are not on the path, with their names."""
    for prefix, module in path_modules(model, path):
        for name, child in module._modules.items():
            full = join(prefix, name)
            if child is not None and full != path and not path.startswith(full + "."):
                yield full, child


def persistent(module: nn.Module) -> bool:
    """True if a module has parameters, or buffers that a checkpoint holds."""
    return bool(module.state_dict(keep_vars=True)) or any(
        True for _ in module.parameters()
    )


class Frame:
    """A model's forward with other blocks.

    Args:
        model: with weights, or on the meta device.
        twin: the model on the meta device.
        cut: where it is cut.
        children: modules that are there, by name.
        parameters: by path module, those that are there, in dictionaries that stay.
    """

    def __init__(
        self,
        model: nn.Module,
        twin: nn.Module,
        cut: CutAt,
        children: Mapping[str, nn.Module],
        parameters: Mapping[str, dict[str, nn.Parameter | None]],
    ) -> None:
        self.site = Site()
        self._modules: list[tuple[str, nn.Module, nn.Module]] = []
        """Names, copies of path modules, and the model's own."""
        self._absent: list[tuple[nn.Module, str, torch.Size, torch.dtype]] = []
        """Parameters of path modules that other layers have."""
        self._children, self._parameters, self._cut = children, parameters, cut
        self._root = self._copy("", model, twin)
        self._everywhere = [
            (part, model.get_submodule(name).get_submodule(within))
            for name, module in children.items()
            if name not in cut.before | cut.after
            for within, part in module.named_modules()
        ]
        """Parts of modules that every layer has, and the model's own."""
        self.on(torch.device("cpu"))

    def run(self, batch: Any, handler: Handler, *, training: bool) -> Any:
        """Run the forward.

        Args:
            batch: a dict gives keywords, a tuple arguments, all else is the argument.
            handler: called in place of each block.
            training: the mode of the modules on the path, and of those that every
                layer has, if it is the model's too.

        Returns:
            The model's output; None if the handler ended the forward.
        """
        for _, copied, original in self._modules:
            copied.training = training and original.training
        for copied, original in self._everywhere:
            copied.training = training and original.training
        self.site.handler = handler
        self.site.made.clear()
        self.site.has_assumed = False
        try:
            if isinstance(batch, dict):
                return self._root(**batch)
            return self._root(*batch) if isinstance(batch, tuple) else self._root(batch)
        except Stop:
            return None
        finally:
            self.site.handler = None

    def on(self, device: torch.device) -> None:
        """Choose the device of what stand-ins put out."""
        self.site.device = device
        self.site.absent.clear()
        for module, key, shape, dtype in self._absent:
            # no memory: one element seen at every place
            nothing = torch.full((), float("nan"), dtype=dtype, device=device)
            stand_in = module.__dict__[key] = nothing.expand(shape)
            self.site.absent[id(stand_in)] = stand_in

    def apply(self, change: Any) -> None:
        """Move what no layer has as its own, as `nn.Module._apply` does."""
        self._root._apply(change)  # type: ignore[no-untyped-call]

    def slots(self) -> list[Slot]:
        """The stand-ins of the blocks."""
        return [m for m in self._root.modules() if isinstance(m, Slot)]

    def path_copies(self) -> list[tuple[str, nn.Module]]:
        """The copies of the modules above the blocks, with their names."""
        return [(name, copied) for name, copied, _ in self._modules]

    def _copy(self, name: str, module: nn.Module, twin: nn.Module) -> nn.Module:
        copied = copy.copy(module)
        state = copied.__dict__
        state["_parameters"] = self._parameters[name]
        state["_buffers"] = dict(module._buffers)
        state["_modules"] = {
            child: self._child(join(name, child), held, twin._modules[child])
            for child, held in module._modules.items()
        }
        state.pop("_output_capturing_hooks_installed", None)
        for key, parameter in twin._parameters.items():
            if parameter is not None and key not in self._parameters[name]:
                self._absent.append((copied, key, parameter.shape, parameter.dtype))
        self._modules.append((name, copied, module))
        return copied

    def _child(
        self, name: str, module: nn.Module | None, twin: nn.Module | None
    ) -> nn.Module | None:
        if module is None or twin is None:
            return None
        if name == self._cut.blocks:
            return self._blocks(name, module, twin)
        if self._cut.blocks.startswith(name + "."):
            return self._copy(name, module, twin)
        if name in self._children:
            return self._children[name]
        kind = Absent if name in self._cut.before else Missing
        return kind(name, twin, self.site)

    def _blocks(self, name: str, blocks: nn.Module, twins: nn.Module) -> nn.Module:
        copied = copy.copy(blocks)
        copied.__dict__["_modules"] = {
            key: Slot(index, f"{name}.{key}", twin, self.site)
            for index, (key, twin) in enumerate(twins.named_children())
        }
        return copied


def find_blocks(model: nn.Module, path: str) -> nn.Module:
    """The list of blocks at a path.

    Raises:
        RequestError: there is no list of modules.
    """
    module: Any = model
    for part in path.split("."):
        module = getattr(module, part, None)
    if not _is_list(module):
        lists = [
            f"{name} ({len(submodule)})"
            for name, submodule in model.named_modules()
            if _is_list(submodule) and len(submodule) > 1
        ]
        raise RequestError(
            f"{path} is {_kind(module)} in a {type(model).__name__}; name the "
            "ModuleList, Sequential or ModuleDict of its repeated blocks. It has "
            f"{', '.join(lists[:8]) or 'none'}"
        )
    return module


def _is_list(module: Any) -> TypeGuard[nn.ModuleList | nn.Sequential | nn.ModuleDict]:
    """True for a list of modules, and for a dictionary of modules of one type.

    torchtitan's models have their blocks in a dictionary, so that a stage can leave
    some out. Dictionaries also hold unlike modules, as nanoGPT's ``transformer`` does.
    """
    lists = (nn.ModuleList, nn.Sequential)
    if isinstance(module, nn.ModuleDict):
        kinds = {type(child) for child in module.values()}
        return len(kinds) == 1 and not issubclass(kinds.pop(), lists)
    return isinstance(module, lists) and len(module) > 0


def _kind(module: object) -> str:
    return "nothing" if module is None else f"a {type(module).__name__}"


def join(prefix: str, name: str) -> str:
    """Name of a child, given its parent's."""
    return f"{prefix}.{name}" if prefix else name
