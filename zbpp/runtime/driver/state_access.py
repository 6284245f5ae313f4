"""Settle the pending step before parameters or optimizer state are accessed.

    state_dict, load_state_dict      torch's hooks on modules and optimizers
    deepcopy, pickle, torch.save     a `__getstate__` of the single object

Both cost nothing in the loop, and copies carry neither. To read a parameter itself
(`p.clone()`, an average of weights) calls nothing that could settle: before that a
script calls `pipeline.synchronize()`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["AccessHooks", "eval_mode", "settle_before_access"]

_HOOKS = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks")


class _Settle:
    """A hook that calls an action. Its copies and pickles do nothing."""

    def __init__(self, action: Callable[[], None] | None = None) -> None:
        self._action = action

    def __call__(self, *_: Any, **__: Any) -> None:
        if self._action is not None:
            self._action()

    def __reduce__(self) -> tuple[type["_Settle"], tuple[()]]:
        return _Settle, ()


class _Method:
    """A method of one object that settles first.

    It stands in the object's ``__dict__``, where `copy` and `pickle` look before they
    look at the class. Where a copy takes it along, it is the class's own method there.
    """

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = owner, name
        self.inner = vars(owner).get(name)
        self.settles: list[_Settle] = []

    def __call__(self, *args: Any) -> Any:
        for settle in self.settles:
            settle()
        if self.inner is not None:
            found = self.inner(*args)
        else:
            found = getattr(type(self._owner), self._name)(self._owner, *args)
        return _without_hooks(found) if self._name == "__getstate__" else found

    def __reduce__(self) -> tuple[type["_Method"], tuple[object, str]]:
        return _Method, (self._owner, self._name)


class AccessHooks:
    """The hooks of one pipeline.

    Args:
        action: called before an access.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._settle = _Settle(action)
        self._handles: list[Any] = []
        self._methods: list[tuple[object, str]] = []

    def add(self, owner: Any) -> None:
        """Settle before a module or an optimizer is saved, loaded, copied, pickled."""
        self._handles += [
            owner.register_state_dict_pre_hook(self._settle),
            owner.register_load_state_dict_pre_hook(self._settle),
        ]
        kind = type(owner)
        names = ["__getstate__"]
        if hasattr(kind, "__deepcopy__"):
            names.append("__deepcopy__")
        if (kind.__reduce__, kind.__reduce_ex__) != _OF_OBJECT:
            names.append("__reduce_ex__")
        for name in names:
            held = vars(owner).get(name)
            if not isinstance(held, _Method):
                held = vars(owner)[name] = _Method(owner, name)
            held.settles.append(self._settle)
            self._methods.append((owner, name))

    def remove(self) -> None:
        """Leave all as it was, but for the hooks of other pipelines."""
        for handle in self._handles:
            handle.remove()
        for owner, name in self._methods:
            method = vars(owner).get(name)
            if isinstance(method, _Method) and self._settle in method.settles:
                method.settles.remove(self._settle)
                if not method.settles:
                    del vars(owner)[name]
                    if method.inner is not None:
                        vars(owner)[name] = method.inner
        self._handles, self._methods = [], []


_OF_OBJECT = (object.__reduce__, object.__reduce_ex__)


def settle_before_access(
    layers: Iterable[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    action: Callable[[], None],
) -> AccessHooks:
    """Call something before any state is saved, loaded, copied or pickled.

    Args:
        layers: hooks are set on their modules; a model that holds them calls them too.
        optimizers: likewise.
        action: cheap if there is nothing to do.
    """
    hooks = AccessHooks(action)
    modules = dict.fromkeys(m for layer in layers for m in layer.modules())
    for owner in (*modules, *optimizers):
        hooks.add(owner)
    return hooks


def _without_hooks(state: Any) -> Any:
    """A module's state without what has been put there to settle."""
    if not isinstance(state, dict):
        return state
    kept = {key: v for key, v in state.items() if not isinstance(v, _Method)}
    for name in _HOOKS:
        if kept.get(name):
            hooks = ((k, h) for k, h in kept[name].items() if not _settles(h))
            kept[name] = type(kept[name])(hooks)
    return kept


def _settles(hook: Any) -> bool:
    return isinstance(getattr(hook, "hook", hook), _Settle)


@contextmanager
def eval_mode(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Layers in eval mode; afterwards each module is in its own mode again."""
    modes = [
        (module, module.training) for layer in layers for module in layer.modules()
    ]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
