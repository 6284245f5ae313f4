"""Compiled layers on fake tensors, among others that a stage runs.

torch compiles as ever up to its finished graphs, and zbpp's backend cuts these: what F
keeps for B, and what B leaves for W, are then those of a run. No kernel is made of a
graph: it is walked, and what its nodes take is counted.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from zbpp.memory.compiling.walk import GraphWalk
from zbpp.memory.tracker import StorageTracker
from zbpp.runtime.compiled.layers import compiled_by, is_worth_it
from zbpp.runtime.support.compile_internals import compile_errors

__all__ = ["CompiledLayers", "checkpointed"]


def checkpointed(layer: nn.Module, value: Any) -> Any:
    """Run a layer that B runs once more; it is not compiled."""
    return checkpoint(layer, value, use_reentrant=False)


class CompiledLayers:
    """Runs layers compiled; each is compiled once.

    Args:
        mode: of all fake tensors.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self.tracker: StorageTracker | None = None
        """Counts what the graphs make."""
        self._calls: dict[nn.Module, Callable[[Any], Any]] = {}
        self._is_apart = False
        self.refused: set[nn.Module] = set()
        """Layers that the compiler makes no single graph of: they run as they are."""

    def run(self, layer: nn.Module, value: Any) -> Any:
        """Run a layer; one in which there is nothing to fuse runs as it is."""
        if not is_worth_it(layer) or layer in self.refused:
            return layer(value)
        if layer not in self._calls:
            self._calls[layer] = compiled_by(layer, self._finish)
        self._is_apart = True
        try:
            with _disable_current_modes():  # else the compiler stands aside
                return self._calls[layer](value)
        except compile_errors():
            self.refused.add(layer)
        finally:
            self._is_apart = False
        return layer(value)

    def _finish(
        self, graph: fx.GraphModule, _: Sequence[Any], **about: Any
    ) -> Callable[[list[Any]], Any]:
        """Return what runs a finished graph."""
        walk = GraphWalk(graph.graph, self._mode)

        def boxed(args: list[Any]) -> Any:
            tracker = self.tracker
            assert tracker is not None, "a layer runs while it is traced"
            with ExitStack() as stack:
                if self._is_apart:
                    stack.enter_context(self._mode)
                    stack.enter_context(tracker)
                return walk.run(args, tracker)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed
