"""Compiled layers on fake tensors, among others that a stage runs.

torch compiles as ever up to its finished graphs, and zbpp's backend cuts these: what F
keeps for B, and what B leaves for W, are then those of a run. No kernel is built: the
code around the kernels is written as ever, and run without them.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from zbpp.memory.compiling.written import written_call
from zbpp.memory.tracker import StorageTracker
from zbpp.runtime.compiled.layers import Call, compiled_by
from zbpp.runtime.driver.compile_chunks import compiled_layer, has_compiled_part
from zbpp.runtime.support.compile_internals import compile_errors, writes_code
from zbpp.runtime.ties.plan import find_ties

__all__ = ["CompiledLayers", "checkpointed", "runs_at_once"]


def checkpointed(layer: nn.Module, value: Any) -> Any:
    """Run a layer that B runs once more; it is not compiled."""
    return checkpoint(layer, value, use_reentrant=False)


def runs_at_once(
    layers: Sequence[nn.Module], own: Collection[int], on_stage: Collection[int]
) -> bool:
    """True if a run compiles a chunk as one where chunks are compiled.

    Else it does so layer by layer: parts of layers are compiled, or a tied weight has
    another place in the same stage before.

    Args:
        layers: of the model.
        own: numbers of the chunk's.
        on_stage: numbers of its stage's.
    """
    held = ([i for i, _ in tie if i in on_stage] for tie in find_ties(layers))
    if any(not set(own).isdisjoint(places[1:]) for places in held):
        return False
    return not any(has_compiled_part(layers[i]) for i in own)


class CompiledLayers:
    """Runs layers compiled; each is compiled once.

    Args:
        mode: of all fake tensors.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self.tracker: StorageTracker | None = None
        """Counts what the graphs make."""
        self._calls: dict[nn.Module, Call] = {}
        self._is_apart = False
        self.refused: set[nn.Module] = set()
        """Layers that the compiler makes no single graph of: they run as they are."""

    def refuse(self, layer: nn.Module) -> bool:
        """Let a layer run as it is from now on; False: it does already.

        Kernels compute no numbers, and layers of experts may decide by some.
        """
        is_new = layer not in self.refused
        self.refused.add(layer)
        return is_new

    def run(self, layer: nn.Module, value: Any) -> Any:
        """Run a layer; one in which there is nothing to fuse runs as it is."""
        if layer not in self._calls:
            made = compiled_layer(layer, partial(self._compiled, layer))
            self._calls[layer] = made or layer
        return self._calls[layer](value)

    def _compiled(self, layer: nn.Module, part: Call) -> Call:
        """Return a compiled call of a layer, or of a module in it."""
        made: Any = compiled_by(part, self._finish)

        def call(*args: Any, **kwargs: Any) -> Any:
            if layer in self.refused or not writes_code():
                self.refused.add(layer)
                return part(*args, **kwargs)
            self._is_apart = True
            try:
                with _disable_current_modes():  # else the compiler stands aside
                    return made(*args, **kwargs)
            except compile_errors():
                self.refused.add(layer)
            finally:
                self._is_apart = False
            return part(*args, **kwargs)

        return call

    def _finish(
        self, graph: fx.GraphModule, inputs: Sequence[Any], **about: Any
    ) -> Callable[[list[Any]], Any]:
        """Return what runs a finished graph."""
        call = written_call(graph, inputs, **about)

        def boxed(args: list[Any]) -> Any:
            tracker = self.tracker
            assert tracker is not None, "a layer runs while it is traced"
            with ExitStack() as stack:
                if self._is_apart:
                    stack.enter_context(self._mode)
                    stack.enter_context(tracker)
                return call(args)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed
