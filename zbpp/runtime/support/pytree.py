"""Tensors in the containers that torch's pytree knows; a container keeps its type.

They are tuples, lists, dicts, named tuples, `OrderedDict`, `defaultdict`, `deque`, and
classes that are registered with it, as Hugging Face's `ModelOutput` is. All else is
opaque: returned as it is.
"""

import gc
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

from zbpp.core import RequestError

KNOWN = (
    "a tuple, list, dict, or a class that is registered with "
    "torch.utils._pytree.register_pytree_node, a dataclass with "
    "torch.utils._pytree.register_dataclass"
)
"""The containers, in errors."""

_PLAIN = {type(None), bool, int, float, complex, str, bytes}

# Torch's names for pytrees, seen in torch 2.9 to 2.13; it documents none of them.
TreeSpec = torch_pytree.TreeSpec
flatten_tree = torch_pytree.tree_flatten
unflatten_tree = torch_pytree.tree_unflatten


def map_tensors(
    thing: Any,
    change: Callable[[Tensor], Tensor],
    change_object: Callable[[Any], Any] | None = None,
) -> Any:
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
    leaves, containers = flatten_tree(thing)
    if containers.is_leaf():
        return thing if change_object is None else change_object(thing)
    changed = [map_tensors(leaf, change, change_object) for leaf in leaves]
    return unflatten_tree(changed, containers)


def tensors_in(thing: Any) -> list[Tensor]:
    """All tensors in a thing, in order."""
    leaves = [thing] if isinstance(thing, Tensor) else torch_pytree.tree_leaves(thing)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def refuse_hidden(thing: Any) -> Any:
    """Return an opaque thing, if no gradient is lost in it; for `map_tensors`.

    Raises:
        RequestError: it refers to a tensor that needs a gradient and is no parameter,
            which would be cut off, or lead past the split.
    """
    if isinstance(thing, nn.Module) or callable(thing):
        return thing
    for tensor in tensors_in(gc.get_referents(thing)):
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            raise RequestError(
                f"a {type(thing).__name__} contains tensors that need a gradient, and "
                f"is no known container; use {KNOWN}"
            )
    return thing
