"""Why a leaf that no product uses as its weight has its gradient in B, for a report."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from zbpp.runtime.backward.paths import LEAF
from zbpp.runtime.backward.products import RULES
from zbpp.runtime.support.compile_internals import is_compiled

__all__ = ["NO_WEIGHT", "causes_in_b"]

NO_WEIGHT = "no product's weight"
"""The reason of an embedding, a norm, a bias: nothing could wait."""

_COMPUTED = "a product's weight is computed from it"
_RECURRENT = "inside a fused kernel of a recurrent layer"
_LOOKUPS = ("Embedding", "Index", "Gather")


def causes_in_b(roots: Iterable[Node], inputs: Collection[int]) -> dict[Tensor, str]:
    """Give the reason of each leaf that a product might have used, but for its way.

    Args:
        roots: nodes of a forward's outputs.
        inputs: ids of the leaves that are no parameters.
    """
    causes: dict[Tensor, str] = {}
    nodes: dict[Any, None] = dict.fromkeys(roots)
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        reason = _reason_of(node)
        for below, _ in node.next_functions:
            if below is None:
                continue
            if reason and _is_leaf(below):
                causes.setdefault(below.variable, reason)
            if below not in nodes:
                nodes[below] = None
                waiting.append(below)
        for leaf in _computed_from(node, inputs):
            causes.setdefault(leaf, _COMPUTED)
    return causes


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == LEAF


def _is_function(node: Any) -> bool:
    """True for the node of an `autograd.Function` of somebody's own."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _reason_of(node: Any) -> str | None:
    """The reason to keep what a node reads in B, whatever that is."""
    name = type(node).__name__
    if _is_function(node) and not is_compiled(node):
        return f"inside {name.removesuffix('Backward')}, an autograd.Function"
    if any(part in name.lower() for part in ("rnn", "lstm", "gru")):
        return _RECURRENT
    return None


def _computed_from(node: Any, inputs: Collection[int]) -> list[Tensor]:
    """The leaves that the weight of a product is computed from, by more than views."""
    rule = RULES.get(type(node).__name__)
    if rule is None:
        return []
    for choice in rule.choices:
        leaves = _parameters_above(node.next_functions[choice[0]][0], inputs)
        if leaves:
            return leaves
    return []


def _parameters_above(node: Any, inputs: Collection[int]) -> list[Tensor]:
    """All leaves above a node; none if there is more than arithmetic on parameters."""
    leaves: list[Tensor] = []
    seen, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        name = type(node).__name__
        if _is_leaf(node):
            if id(node.variable) in inputs:
                return []
            leaves.append(node.variable)
        elif name in RULES or name.startswith(_LOOKUPS) or _is_function(node):
            return []
        new: Mapping[Any, None] = {
            below: None for below, _ in node.next_functions if below not in seen
        }
        seen.update(new)
        waiting += new
    return leaves
