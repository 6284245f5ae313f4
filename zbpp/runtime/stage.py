"""The chunks of one stage, and the data that a micro-batch keeps between its passes.

    F  keeps its graph, not its outputs   B needs it
    B  keeps the weight-gradient queue    W needs it
    W  keeps nothing

Gradients are added in micro-batch order whatever the order of the passes, so that all
schedules end with the same bits.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.runtime.backward.accumulate import GradientOrder
from zbpp.runtime.backward.data_parallel import check_module
from zbpp.runtime.backward.queue import WeightQueue
from zbpp.runtime.backward.split import SplitGraph, alias_of
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.microbatches import (
    Tensors,
    as_tensors,
    as_value,
    check_tensors,
    count_samples,
)
from zbpp.runtime.recompute import Recomputed
from zbpp.runtime.support.pytree import map_tensors

__all__ = ["LossFn", "Stage"]

LossFn = Callable[..., Tensor]
"""``loss_fn(outputs, targets) -> scalar``, the mean over one micro-batch."""


@dataclass
class _Saved:
    graph: SplitGraph
    asked: Tensors
    ends: Tensors
    """Of the last chunk, the losses that B starts from, without their graph."""


class Stage:
    """Forward, B and W of this stage's chunks on single micro-batches.

    Args:
        chunks: the chunks held here.
        n_chunks: chunks of the whole model; the last one ends with the loss.
        loss_fn: mean loss of a micro-batch.
        device: where inputs and targets are moved to.
        autocast: compute dtype of the forward, or None.
        seed: if given, the random generator is seeded before every layer from (seed,
            step, layer, micro-batch), so that dropout is the same under every schedule.
        exact_sums: False adds gradients as they come, within the products' kernels.
        recompute: global indices of the layers whose graph B computes again.

    Raises:
        RequestError: a layer is wrapped by data parallelism.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        n_chunks: int,
        loss_fn: LossFn,
        device: torch.device,
        autocast: torch.dtype | None = None,
        seed: int | None = None,
        exact_sums: bool = True,
        recompute: Collection[int] = (),
    ) -> None:
        self.chunks: Mapping[int, Chunk] = {chunk.index: chunk for chunk in chunks}
        for chunk in chunks:
            for index, layer in chunk.numbered():
                check_module(layer, f"layers.{index}")
        self._last = n_chunks - 1
        self._loss_fn = loss_fn
        self.device = device
        self._autocast = autocast
        self._seed = seed
        self._exact_sums = exact_sums
        self.recompute(recompute)
        self.where: dict[int, dict[Tensor, str]] = {}
        """Of each chunk that has run B: `SplitGraph.report` of its first one."""
        self.defers = False
        """W of some chunk has had something to do."""
        self._orders = {
            index: GradientOrder(chunk.parameters(), is_released=not exact_sums)
            for index, chunk in self.chunks.items()
        }
        self._changes_inputs = {
            chunk.index
            for chunk in chunks
            if any(
                getattr(part, "inplace", False) for part in chunk.layers[0].modules()
            )
        }
        self.loss_scale = 1.0
        """Factor of the loss in the next backwards."""
        self.begin(step=0, inputs=None, targets=None, n_microbatches=1)

    def numbered(self) -> Iterator[tuple[int, nn.Module]]:
        """Global index and layer, chunk after chunk."""
        return chain.from_iterable(chunk.numbered() for chunk in self.chunks.values())

    @property
    def seeded(self) -> bool:
        """True if the random numbers of a forward depend on its place alone."""
        return self._seed is not None

    def recompute(self, layers: Collection[int]) -> None:
        """Choose the layers whose graph B computes again, from the next step on."""
        self._recomputed = {
            index: Recomputed(layer, f"layers.{index}", self.device)
            for index, layer in self.numbered()
            if index in layers
        }

    def begin(
        self,
        *,
        step: int,
        inputs: Sequence[Tensors] | None,
        targets: Sequence[object] | None,
        n_microbatches: int,
    ) -> None:
        """Start a step: take its micro-batches, forget what an earlier one left."""
        self.step = step
        self._inputs = inputs
        self._targets = targets
        self.n_microbatches = n_microbatches
        self._saved: dict[tuple[int, int], _Saved] = {}
        for order in self._orders.values():
            order.begin()
        self.losses: dict[int, Tensor] = {}

    def weighted_losses(self) -> Tensor:
        """Loss and number of samples of each micro-batch, (2, micro-batches) float64.

        All zero on the stages that do not hold the last chunk.
        """
        table = torch.zeros(2, self.n_microbatches, dtype=torch.float64)
        for microbatch, loss in self.losses.items():
            assert self._targets is not None
            table[0, microbatch] = loss
            table[1, microbatch] = count_samples(self._targets[microbatch])
        return table.to(self.device)

    def watch_gradients(self, look: Callable[[int, int], None]) -> None:
        """Call ``look(chunk, microbatch)`` in this step after every addition."""
        for chunk, order in self._orders.items():
            order.watch = partial(look, chunk)

    @property
    def n_in_flight(self) -> int:
        """Forwards whose backward is not done."""
        return len(self._saved)

    def discard(self) -> None:
        """Forget the forwards so far; they will run once more."""
        self._saved.clear()
        self.losses.clear()

    def assert_empty(self) -> None:
        """After a step nothing may be left alive."""
        assert not self._saved, f"left over: {sorted(self._saved)}"

    def predict(self, chunk: int, microbatch: int, inputs: Tensors | None) -> Tensors:
        """Forward without gradients, for evaluation."""
        with torch.no_grad(), self._autocast_context():
            return self._run_layers(chunk, microbatch, self._take(microbatch, inputs))

    def forward(self, chunk: int, microbatch: int, inputs: Tensors | None) -> Tensors:
        """F: run the layers (and the loss, on the last chunk); keep the graph.

        Args:
            chunk: one of this stage's.
            microbatch: its number in the step.
            inputs: the outputs of the chunk before; None on chunk 0, which reads the
                step's own inputs.

        Returns:
            The outputs, detached; those that need a gradient say so.
        """
        if inputs is not None:
            inputs = _detached(inputs)
        taken = self._take(microbatch, inputs)
        read = taken
        if chunk in self._changes_inputs:
            read = type(taken)(alias_of(x) if x.requires_grad else x for x in taken)
        queue = WeightQueue()
        with queue.recording(), self._autocast_context():
            outputs = self._run_layers(chunk, microbatch, read)
        asked = taken if chunk > 0 else ()
        graph = SplitGraph(outputs, asked, queue, is_exact=self._exact_sums)
        ends = _detached(outputs) if chunk == self._last else ()
        self._saved[chunk, microbatch] = _Saved(graph, asked, ends)
        return _detached(outputs)

    def backward_input(
        self, chunk: int, microbatch: int, gradients: Tensors | None
    ) -> Tensors:
        """B: gradients of the inputs (and of all but the deferred weights).

        Args:
            chunk: one of this stage's.
            microbatch: its number in the step.
            gradients: one for each output of F that needs one; None on the last chunk.

        Returns:
            One gradient for each input of F that needs one.
        """
        saved = self._saved[chunk, microbatch]
        if gradients is None:
            gradients = tuple(
                torch.full_like(y, self.loss_scale / self.n_microbatches)
                for y in saved.ends
                if y.requires_grad
            )
        if chunk not in self.where:
            self.where[chunk] = saved.graph.report()
        found = self._orders[chunk].run_b(microbatch, saved.graph, gradients)
        self.defers = self.defers or saved.graph.defers()
        asked = [x for x in saved.asked if x.requires_grad]
        result = tuple(
            torch.zeros_like(x) if dx is None else dx
            for x, dx in zip(asked, found, strict=True)
        )
        saved.asked = saved.ends = ()
        return result

    def backward_weight(self, chunk: int, microbatch: int) -> None:
        """W: the weight gradients that B has deferred."""
        graph = self._saved.pop((chunk, microbatch)).graph
        self._orders[chunk].run_w(microbatch, graph)

    def own_batch(self, chunk: int, microbatch: int) -> list[object]:
        """The parts of the batch that a forward of this chunk reads, if any."""
        read: list[Sequence[object] | None] = []
        read += [self._inputs] if chunk == 0 else []
        read += [self._targets] if chunk == self._last else []
        return [part[microbatch] for part in read if part is not None]

    def _take(self, microbatch: int, inputs: Tensors | None) -> Tensors:
        if inputs is not None:
            return inputs
        assert self._inputs is not None, "this stage needs the step's inputs"
        own = self._inputs[microbatch]
        check_tensors(own, f"the input of micro-batch {microbatch} is")
        return type(own)(x.to(self.device) for x in own)

    def _run_layers(self, chunk: int, microbatch: int, inputs: Tensors) -> Tensors:
        value: object = as_value(inputs)
        held = self.chunks[chunk]
        for layer_index, layer in held.numbered():
            if self._seed is not None:
                self._reseed(hash((self._seed, self.step, layer_index, microbatch)))
            value = self._recomputed.get(layer_index, layer)(value)
        if chunk == self._last and self._targets is not None:
            target = map_tensors(self._targets[microbatch], lambda t: t.to(self.device))
            value = self._loss_fn(value, target)
            if not isinstance(value, Tensor) or value.dim() != 0:
                raise RequestError(
                    "loss_fn must return a scalar tensor, the mean over a micro-batch"
                )
            # A copy: mse_loss's scalar holds the memory of all its summands.
            self.losses[microbatch] = value.detach().clone()
        outputs = as_tensors(value)
        last = held.first + len(held.layers) - 1
        check_tensors(
            outputs, f"chunk {chunk} (layers {held.first} to {last}) puts out"
        )
        return outputs

    def _reseed(self, number: int) -> None:
        seed = number & 0x7FFF_FFFF_FFFF_FFFF
        if self.device.type == "cpu":
            # torch.manual_seed notes a stack trace for each kind of absent device.
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def _autocast_context(self) -> AbstractContextManager[object]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast)


def _detached(tensors: Tensors) -> Tensors:
    """Cut them off their graph; they still say whether they need a gradient."""
    return type(tensors)(y.detach().requires_grad_(y.requires_grad) for y in tensors)
