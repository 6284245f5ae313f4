"""Hooks of others on the nodes of a graph.

A node does not show its hooks. Those that were registered on it by hand are found by
registering one more, which shows the dictionary that all share. Those of a tensor (of
``w.t()``, say) cannot be found so. Hence the count: torch numbers all hooks, and a node
that was made after the last one was registered has none.

Nodes are numbered by the thread that makes them, that of their forward, which may be
another one than that of the backward, and than those of other forwards. So the number
of the first free node belongs to a forward (`Birth`).
"""

import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from zbpp.runtime.support.autograd_internals import (
    hooks_made,
    nodes_made,
    sequence_number,
)

__all__ = ["UNKNOWN", "Birth", "HookWatch", "watch"]


UNKNOWN = -1
"""The number of others' hooks where torch does not tell it."""


class Birth(NamedTuple):
    """The hooks that there were when a forward began.

    Args:
        n_others: hooks of others that had been registered.
        first_node: number of the first node of its thread that has none of them.
    """

    n_others: int
    first_node: int


class HookWatch:
    """Tells which nodes were made since the last hook, our own left out."""

    def __init__(self) -> None:
        self._n_own = 0
        self.n_others = UNKNOWN
        """Hooks that others had registered at the last look."""
        self._first_node = 0
        self._threads = threading.local()
        self._thread: object = None
        """The thread that has seen the last hook; `_first_node` is of its numbers."""
        self._free_from = sys.maxsize
        self._clean_leaves: set[int] = set()

    def begin_forward(self) -> Birth:
        """Look, in the thread that makes the nodes from here on."""
        self.look()
        is_here = self._here() is self._thread
        return Birth(self.n_others, self._first_node if is_here else nodes_made())

    def look(self) -> None:
        """Note whether hooks were registered since the last look.

        If so, every node made until now may have one. A look before a forward keeps
        its nodes apart from older hooks.
        """
        made = hooks_made()
        n_others = UNKNOWN if made is None else made - self._n_own
        if n_others != self.n_others or made is None:
            self.n_others = n_others
            self._thread, self._first_node = self._here(), nodes_made()
            self._clean_leaves.clear()

    def _here(self) -> object:
        """This thread; its number may be another's when it has ended."""
        if not hasattr(self._threads, "this"):
            self._threads.this = object()
        return self._threads.this

    def turn_to(self, birth: Birth) -> None:
        """Look, and be asked from here on for the nodes of one forward."""
        self.look()
        is_as_then = birth.n_others == self.n_others != UNKNOWN
        self._free_from = birth.first_node if is_as_then else sys.maxsize

    def is_free(self, node: Any) -> bool:
        """True if no hook was registered since the node, no leaf's, was made."""
        return sequence_number(node) >= self._free_from

    def add_prehook(self, node: Any, hook: Callable[..., None]) -> Any:
        """Register our own hook, to run before the node; return its handle."""
        self._n_own += 1
        return node.register_prehook(hook)

    def add_hook(self, leaf: Tensor, hook: Callable[[Tensor], None]) -> Any:
        """Register our own hook on a leaf's gradient; return its handle."""
        self._n_own += 1
        return leaf.register_hook(hook)  # type: ignore[no-untyped-call]

    def has_hooks(self, node: Any, *, before: bool) -> bool:
        """True if others have registered a hook on a node itself.

        Args:
            node: of any kind.
            before: count hooks that run before the node, too.
        """
        handles = [node.register_hook(_nothing)]
        if before:
            handles.append(node.register_prehook(_nothing))
        self._n_own += len(handles)
        has_more = any(len(handle.hooks_dict_ref()) > 1 for handle in handles)
        for handle in handles:
            handle.remove()
        return has_more

    def is_clean(self, leaf: Tensor, node: Any) -> bool:
        """True if others have no hooks on a leaf and its node; kept until a new one."""
        if leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            return False
        if id(leaf) in self._clean_leaves:
            return True
        if self.has_hooks(node, before=True):
            return False
        self._clean_leaves.add(id(leaf))
        return True


def _nothing(*_: Any) -> None:
    """Change no gradient."""


watch = HookWatch()
"""Of this process, as torch's numbers of hooks are."""
watch.look()
