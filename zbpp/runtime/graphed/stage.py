"""A stage whose passes are CUDA graphs, once it is known that they may be.

Experimental. All stages must be in one process: to record a graph waits for the whole
device, and with it for messages of other processes.

    steps 0, 1     as ever: kernels are chosen, buffers and random numbers watched
    from step 2    a slot for each micro-batch in flight; F, B, W are recorded when they
                   first run there, and replayed from then on

Micro-batches of other shapes run as ever, and so does a chunk that graphs do not fit
(`GraphedStage.why_not`). A graph repeats kernels on the memory of its first run. What a
layer does on the host (count calls, call a hook) it does not repeat, and
what it writes it writes unseen: where a step may be rolled back, buffers that change
could not be restored.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.backward.plan_cache import SplitPlanCache
from zbpp.runtime.backward.split import SplitGraph
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.graphed.slot import MakePool, Slot, Totals
from zbpp.runtime.layer_random import LayerRandom
from zbpp.runtime.stage import Saved, Stage
from zbpp.runtime.state_recorder import BufferRecorder
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.values import Nested, Tensors, detached, leaves

__all__ = ["GraphedStage"]

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)

_WARM_UP = 2
"""Steps that run as ever before anything is recorded."""

_MOST_TIMES = 3
"""A chunk whose parameters get other memory so often is recorded no more."""


@dataclass
class _Graphs:
    """The slots of one chunk, by the kind of their micro-batches."""

    totals: Totals
    why_not: str
    first: dict[Any, int] = field(default_factory=dict)
    """Step in which a kind was first seen."""
    free: dict[Any, list[Slot]] = field(default_factory=dict)
    taken: dict[Slot, Any] = field(default_factory=dict)
    identity: Any = None
    n_recorded: int = 0
    """Times that slots were begun anew."""


class GraphedStage(Stage):
    """A stage; see there.

    Args:
        make_pool: gives each slot its memory; without one, all runs as ever.
        args, kwargs: of `Stage`.
    """

    def __init__(
        self, *args: Any, make_pool: MakePool | None = None, **kwargs: Any
    ) -> None:
        self._make_pool = make_pool
        self._n_steps = -1
        self._records = False
        self._graphs: dict[int, _Graphs] = {}
        super().__init__(*args, **kwargs)
        for i, chunk in self.chunks.items():
            why = reason_against(chunk)
            if not self._recomputed.keys().isdisjoint(n for n, _ in chunk.numbered()):
                why = "some of its layers are recomputed"
            self._graphs[i] = _Graphs(Totals(chunk.leaves_once()), why)

    def why_not(self, chunk: int) -> str:
        """Say why a chunk's passes run as ever; empty: they are graphs."""
        if self._make_pool is None:
            return f"a {self.device.type} has none"
        graphs = self._graphs[chunk]
        if not graphs.why_not and not graphs.n_recorded:
            return "not recorded yet"
        return graphs.why_not

    @property
    def n_slots(self) -> dict[int, int]:
        """Of each chunk, the number of micro-batches with graphs of their own."""
        return {
            i: sum(map(len, slots.free.values())) + len(slots.taken)
            for i, slots in self._graphs.items()
        }

    def begin(self, **step: Any) -> None:
        """Start a step; see `Stage.begin`."""
        super().begin(**step)
        self._n_steps += 1
        for i, graphs in self._graphs.items():
            self._let_go(graphs)
            if not graphs.why_not and graphs.identity is not None:
                self._look(graphs, identity_of(self.chunks[i]))

    def discard(self) -> None:
        """Forget the forwards so far; see `Stage.discard`."""
        super().discard()
        for graphs in self._graphs.values():
            self._let_go(graphs)

    def _let_go(self, graphs: _Graphs) -> None:
        """Free all slots; what is recorded in part was of weights that may change."""
        for slot, kind in list(graphs.taken.items()):
            if slot.is_whole:
                graphs.free[kind].append(slot)
        graphs.taken.clear()

    def _look(self, graphs: _Graphs, identity: Any) -> None:
        """Begin anew where parameters have other memory, or modules another mode."""
        if graphs.identity != identity:
            graphs.identity = None
            graphs.free.clear()
            if graphs.n_recorded >= _MOST_TIMES:
                graphs.why_not = "its parameters or buffers get other memory"

    def forward(self, chunk: int, microbatch: int, inputs: Tensors | None) -> Tensors:
        """F; see `Stage.forward`."""
        graphs = self._graphs[chunk]
        keeps_outputs = chunk == self._last and self.outputs is not None
        if (
            self._make_pool is None
            or graphs.why_not
            or keeps_outputs
            or not self.loss.counts(microbatch)
        ):
            return super().forward(chunk, microbatch, inputs)
        targets = self.loss.targets if chunk == self._last else None
        taken = self._uploads.take(microbatch) if inputs is None else leaves(inputs)
        kind = kind_of(taken, targets and targets[microbatch])
        if kind is None:
            return super().forward(chunk, microbatch, taken)
        first = graphs.first.setdefault(kind, self._n_steps)
        if self._n_steps - first < _WARM_UP:
            run = partial(super().forward, chunk, microbatch, taken)
            outputs, graphs.why_not = watched(self.chunks[chunk], self.random, run)
            if chunk == self._last and self.loss.returned:
                graphs.why_not = "loss_fn returns metrics"
            return outputs
        slot = self._slot(chunk, graphs, kind)
        return self._replay(slot, chunk, microbatch, taken)

    def _seeds(self, chunk: int, microbatch: int) -> Callable[[int], None] | None:
        return None if self._records else super()._seeds(chunk, microbatch)

    def _slot(self, chunk: int, graphs: _Graphs, kind: Any) -> Slot:
        """Return a free slot, or one more."""
        assert self._make_pool is not None
        if graphs.identity is None:
            graphs.identity = identity_of(self.chunks[chunk])
            graphs.n_recorded += 1
            # leaves' nodes know the stream that they were made on: make new ones
            self._orders[chunk].plans = SplitPlanCache()
        free = graphs.free.setdefault(kind, [])
        slot = free.pop() if free else None
        if slot is None:
            slot = Slot(self._make_pool(), graphs.totals, partial(_free, graphs, kind))
        graphs.taken[slot] = kind
        return slot

    def _replay(
        self, slot: Slot, chunk: int, microbatch: int, taken: Tensors
    ) -> Tensors:
        is_last = chunk == self._last
        targets = self.loss.take(microbatch) if is_last else None
        run = super().forward

        def forward(inputs: Tensors, targets: object) -> tuple[Tensors, SplitGraph]:
            self._records = True  # what draws is not recorded, and needs no seeds
            with self.loss.reading(targets):
                outputs = run(chunk, microbatch, inputs)
            self._records = False
            graph = self._saved[chunk, microbatch].graph
            assert isinstance(graph, SplitGraph)
            return outputs, graph

        outputs = slot.forward(taken, targets, forward)
        cut_off = detached(outputs)
        ends = cut_off if is_last else ()
        self._saved[chunk, microbatch] = Saved(slot, ends)
        if is_last:
            self.loss.keep(microbatch, outputs[0].detach())
        return cut_off


def _free(graphs: _Graphs, kind: Any, slot: Slot) -> None:
    graphs.free[kind].append(slot)
    del graphs.taken[slot]


def reason_against(chunk: Chunk) -> str:
    """Say why a chunk is not recorded, as far as it shows; empty: nothing does."""
    if chunk.leaves:
        return "it has parameters that other layers share"
    for module in _modules(chunk):
        if any(getattr(module, name, None) for name in _HOOKS):
            return f"a {type(module).__name__} has hooks"
    for _, name, p in chunk.all_leaves():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            return f"{name} has hooks"
        if type(p) is not nn.Parameter or p.layout is not torch.strided:
            return f"{name} is a {type(p).__name__}"
    return ""


def watched(
    chunk: Chunk, random: LayerRandom, run: Callable[[], Tensors]
) -> tuple[Tensors, str]:
    """Run a forward as it is; say as well why it must not be recorded, or nothing."""
    buffers = BufferRecorder(chunk.layers).snapshot()
    outputs, draws = random.watch(run)
    changed = buffers.changed(compares=True)
    if draws:
        return outputs, "it draws random numbers"
    if changed:
        return outputs, "it changes buffers"
    if isinstance(outputs, Nested):
        return outputs, "it gives more than tensors"
    return outputs, ""


def kind_of(taken: Tensors, targets: object) -> Any:
    """Describe what a forward reads: graphs are of micro-batches of one kind.

    None: of a kind that is not recorded.
    """
    if isinstance(taken, Nested):
        return None
    if any(type(x) is not Tensor or x.layout is not torch.strided for x in taken):
        return None
    numbers = [(x.shape, x.dtype, x.requires_grad) for x in taken]
    return (*numbers, repr(map_tensors(targets, _described)))


def _described(x: Tensor) -> Any:
    return x.dtype, tuple(x.shape)


def identity_of(chunk: Chunk) -> Any:
    """Tell what graphs of a chunk hold on to: memory, flags, and modes of modules."""
    modules = list(_modules(chunk))
    held: list[Tensor] = [p for _, _, p in chunk.all_leaves()]
    held += [b for module in modules for b in module.buffers(recurse=False)]
    where = [(x.data_ptr(), x.requires_grad) for x in held]
    return where, [module.training for module in modules]


def _modules(chunk: Chunk) -> list[nn.Module]:
    return [module for layer in chunk.layers for module in layer.modules()]
