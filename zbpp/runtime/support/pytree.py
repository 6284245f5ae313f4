"""Tensors in containers: tuples, lists, dicts, dataclasses and what torch knows.

A container keeps its type. Known are the built-in ones and their subclasses (named
tuples, `OrderedDict`, `defaultdict`), dataclasses, and classes registered with torch's
pytree, as Hugging Face's `ModelOutput` is. All else is opaque: handed on as it is.
"""

import copy
import dataclasses
from collections import UserDict, UserList
from collections.abc import Callable, Set
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

from zbpp.core import RequestError

__all__ = [
    "LEAF",
    "REGISTERED",
    "TreeSpec",
    "flatten_tree",
    "map_tensors",
    "refuse_hidden",
    "register_dataclass",
    "tensors_in",
    "unflatten_tree",
]

Change = Callable[[Tensor], Tensor]
Other = Callable[[Any], Any] | None

_PLAIN = {type(None), bool, int, float, complex, str, bytes}

# Torch's names for pytrees, seen in torch 2.9 to 2.13; it documents none of them.
TreeSpec = torch_pytree.TreeSpec
flatten_tree = torch_pytree.tree_flatten
unflatten_tree = torch_pytree.tree_unflatten
register_dataclass = torch_pytree.register_dataclass
REGISTERED = torch_pytree.SUPPORTED_NODES
_, LEAF = flatten_tree(None)


def map_tensors(thing: Any, change: Change, change_object: Other = None) -> Any:
    """Change the tensors of a thing, in containers too.

    ``change_object`` changes what is no tensor, container, number or text; None: it
    stays.
    """
    if isinstance(thing, Tensor):
        return change(thing)
    kind = type(thing)
    if kind in _PLAIN:
        return thing
    if kind is tuple or kind is list:  # the common case, for speed
        return kind([map_tensors(item, change, change_object) for item in thing])
    node = REGISTERED.get(kind)
    if node is not None:
        children, context = node.flatten_fn(thing)
        changed = [map_tensors(child, change, change_object) for child in children]
        return node.unflatten_fn(changed, context)
    return _map_subclass(thing, change, change_object)


def _map_subclass(thing: Any, change: Change, change_object: Other) -> Any:
    """Change the tensors of what torch takes for a leaf: dataclasses, other classes."""
    if isinstance(thing, tuple):
        items = [map_tensors(item, change, change_object) for item in thing]
        if all(new is old for new, old in zip(items, thing, strict=True)):
            return thing
        return type(thing)(*items) if hasattr(thing, "_fields") else type(thing)(items)
    if isinstance(thing, dict | UserDict):
        changed: Any = copy.copy(thing)
        for key, value in thing.items():
            changed[key] = map_tensors(value, change, change_object)
        return changed
    if isinstance(thing, list | UserList):
        changed = copy.copy(thing)
        changed[:] = [map_tensors(item, change, change_object) for item in thing]
        return changed
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return _map_dataclass(thing, change, change_object)
    return thing if change_object is None else change_object(thing)


def _map_dataclass(thing: Any, change: Change, change_object: Other) -> Any:
    """Change the tensors of a dataclass, frozen or not, without its constructor."""
    new = {}
    for field in dataclasses.fields(thing):
        if hasattr(thing, field.name):
            old = getattr(thing, field.name)
            value = map_tensors(old, change, change_object)
            if value is not old:
                new[field.name] = value
    if not new:
        return thing if change_object is None else change_object(thing)
    changed = copy.copy(thing)
    for name, value in new.items():
        object.__setattr__(changed, name, value)
    return changed


def tensors_in(thing: Any) -> list[Tensor]:
    """All tensors in a thing, in order."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    map_tensors(thing, note)
    return tensors


def refuse_hidden(thing: Any) -> Any:
    """Return the thing, if no gradient is lost in it; for `map_tensors`.

    Raises:
        RequestError: an attribute of it, or an item, is a tensor that needs a gradient
            and is no parameter: it would be cut off, or lead past the split.
    """
    if isinstance(thing, nn.Module | type):
        return thing
    slots = (getattr(kind, "__slots__", ()) for kind in type(thing).__mro__)
    names = {
        name
        for names_of_kind in slots
        for name in ([names_of_kind] if type(names_of_kind) is str else names_of_kind)
    }
    inside = [getattr(thing, name, None) for name in names - {"__dict__"}]
    inside += list(getattr(thing, "__dict__", {}).values())
    inside += list(thing) if isinstance(thing, Set) else []
    for tensor in tensors_in(inside):
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            raise RequestError(
                f"a {type(thing).__name__} holds tensors that need a gradient, and is "
                "no known container; use a tuple, list, dict or dataclass, or register "
                "it with torch.utils._pytree.register_pytree_node"
            )
    return thing
