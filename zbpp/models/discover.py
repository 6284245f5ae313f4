"""The parts that run before and after a model's blocks, found in one run.

On the meta device, which computes nothing; if the model asks for values there, on the
model itself.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from zbpp.core import RequestError
from zbpp.models.frame import CutAt, children_on_path, find_blocks
from zbpp.models.stand_ins import SaysYes, meta_twin
from zbpp.models.weights import is_on_meta
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.support.random_state import random_state, set_random_state

__all__ = ["find_order"]

_BLOCK = ""
_NEEDS_VALUES = (NotImplementedError, RuntimeError, TypeError, ValueError)


def find_order(
    model: nn.Module, at: CutAt, example: Any, names: list[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Say which modules run before the first block, and which after the last.

    Args:
        model: of any kind.
        at: where its blocks are.
        example: a batch as the model takes it.
        names: of the modules.

    Raises:
        RequestError: there is no example, the model does not run, or a module runs
            between two blocks or not at all.
    """
    unknown = ", ".join(names)
    if example is None:
        raise RequestError(
            f"{unknown}: it is not known whether they run before or after {at.blocks}; "
            "name them in before= or after=, or give example=, a batch"
        )
    try:
        batch = map_tensors(example, lambda t: t.detach().to("meta"))
        with SaysYes() if is_on_meta(model) else nullcontext():
            log = _order(meta_twin(model), at, batch, skips=True)
    except _NEEDS_VALUES as error:
        if is_on_meta(model):
            raise RequestError(
                f"{unknown}: the model does not run on the meta device, where their "
                f"order is looked up ({error}); name them in before= or after="
            ) from error
        device = next(model.parameters()).device
        batch = map_tensors(example, lambda t: t.detach().to(device))
        log = _order(model, at, batch, skips=False)
    if _BLOCK not in log:
        raise RequestError(f"the forward of the example calls no block of {at.blocks}")
    first, last = log.index(_BLOCK), len(log) - 1 - log[::-1].index(_BLOCK)
    before, after = frozenset(log[:first]), frozenset(log[last + 1 :])
    for name in names:
        if name in log[first:last]:
            raise RequestError(
                f"{name} runs between two blocks of {at.blocks}; a pipeline needs "
                "blocks that follow one another"
            )
        if name not in before | after and not _is_only_held(model, name, log):
            raise RequestError(
                f"{name} runs neither before nor after {at.blocks}; if it is needed, "
                "name it in before= or after="
            )
    return frozenset(names) - after | before & set(names), after & set(names)


def _is_only_held(model: nn.Module, name: str, log: list[str]) -> bool:
    """True if a module does not run, but others that do have all its parameters."""
    run = [model.get_submodule(other_name) for other_name in set(log) - {_BLOCK}]
    theirs = {id(p) for module in run for p in module.parameters()}
    return all(id(p) in theirs for p in model.get_submodule(name).parameters())


def _order(model: nn.Module, at: CutAt, batch: Any, *, skips: bool) -> list[str]:
    """Names of modules in the order of their calls; "" is a block.

    Args:
        model: to be run, without gradients.
        at: where its blocks are.
        batch: for it.
        skips: a block that does not run hands on its input.
    """
    log: list[str] = []
    blocks = [(_BLOCK, block) for block in find_blocks(model, at.blocks).children()]
    handles = []
    for name, module in (*children_on_path(model, at.blocks), *blocks):
        # of a ModuleList it is the children that are called
        for part in module.modules() if name else (module,):
            handles.append(part.register_forward_pre_hook(_Note(log, name)))
        if skips and not name:
            module.forward = _Passes(module.forward)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    before = random_state(device)
    try:
        with torch.no_grad():
            if isinstance(batch, dict):
                model(**batch)
            else:
                model(*batch) if isinstance(batch, tuple) else model(batch)
    finally:
        set_random_state(before, device)
        for handle in handles:
            handle.remove()
    return log


class _Note:
    """A hook that notes a name."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def __call__(self, *_: Any) -> None:
        self._log.append(self._name)


class _Passes:
    """A block's forward, or its input where the block does not run on meta."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._forward(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            return args[0]
