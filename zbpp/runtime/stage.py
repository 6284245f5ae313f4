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
from zbpp.runtime.backward.order import GradientOrder
from zbpp.runtime.backward.split import (
    Progress,
    SplitGraph,
    WeightQueue,
    alias_of,
    memory_of,
)
from zbpp.runtime.backward.wrappers import check_module
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.layer_random import LayerRandom, draws_nothing, has_hooks
from zbpp.runtime.loss import Loss, LossFn, refuse_foreign
from zbpp.runtime.microbatches import MicroBatches
from zbpp.runtime.recompute import Recomputed, Slices, is_sliced
from zbpp.runtime.support.pytree import map_tensors, tensors_in
from zbpp.runtime.support.streams import sent_ahead
from zbpp.runtime.ties.stage import StageTies
from zbpp.runtime.values import (
    Tensors,
    as_tensors,
    as_value,
    gradients_of,
    handed_over,
    leaves,
    mapped,
    ready,
)


@dataclass(slots=True)
class Saved:
    """The state of a micro-batch on a chunk from F to W."""

    graph: SplitGraph
    inputs: Sequence[Tensor]
    """Those that need a gradient, until B."""
    ends: Tensors
    """The losses that B starts from, without their graph; of the last chunk."""


class Stage:
    """Forward, B and W of this stage's chunks on single micro-batches.

    The last of ``n_chunks`` ends with the loss. Inputs and targets are moved to the
    device. ``recompute`` has the indices of the layers whose graph B computes again;
    ``slices`` keep their inputs. Without ``exact_sums`` W adds within the kernels of
    its products.

    Raises:
        RequestError: a layer is wrapped by DistributedDataParallel.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        n_chunks: int,
        loss_fn: LossFn,
        device: torch.device,
        autocast: torch.dtype | None = None,
        exact_sums: bool = True,
        recompute: Collection[int] = (),
        slices: Slices | None = None,
        ties: StageTies | None = None,
        random: LayerRandom | None = None,
    ) -> None:
        self.chunks: Mapping[int, Chunk] = {chunk.index: chunk for chunk in chunks}
        for chunk in chunks:
            for index, layer in chunk.numbered():
                check_module(layer, chunk.name_of(index), on_mesh=True)
        self._last = n_chunks - 1
        self.loss = Loss(loss_fn, device)
        self.device = device
        self._computes: AbstractContextManager[object] = nullcontext()
        self._autocasts = autocast is not None
        if autocast is not None:
            self._computes = torch.autocast(device.type, dtype=autocast)
        self.random = random or LayerRandom(device)
        self._quiet = {
            i: [m for layer in chunk.layers for m in layer.modules()]
            for i, chunk in self.chunks.items()
            if all(map(draws_nothing, chunk.layers))
        }
        """Modules of the chunks that draw no random numbers, unless hooks do."""
        self.ties = ties or StageTies()
        self._exact_sums = exact_sums
        self._only_reads: set[int] = set()
        """Chunks whose first forward has not written to its inputs."""
        self._slices = slices
        self.recompute(recompute)
        self.where: dict[int, dict[Tensor, str]] = {}
        """Of each chunk that has run B: `SplitGraph.report` of its first one."""
        self.defers = False
        """W of some chunk has had something to do."""
        self._orders = {
            i: GradientOrder(c.leaves_once(), c.widen) for i, c in self.chunks.items()
        }
        self.loss_scale = 1.0
        """Factor of the loss in the next backwards."""
        self.begin(MicroBatches(1))

    def numbered(self) -> Iterator[tuple[int, nn.Module]]:
        """Global index and layer, chunk after chunk."""
        return chain.from_iterable(chunk.numbered() for chunk in self.chunks.values())

    def named_leaves(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """Layer, the model's name and parameter, as the forwards use it."""
        return chain.from_iterable(chunk.all_leaves() for chunk in self.chunks.values())

    def named_stepped(self) -> Iterator[tuple[int, str, nn.Parameter]]:
        """Layer, the model's name and parameter, as the optimizer has it."""
        return chain.from_iterable(c.all_stepped() for c in self.chunks.values())

    @property
    def may_draw(self) -> bool:
        """True if some chunk may draw random numbers in this step."""
        return any(self._may_draw.values())

    def recompute(self, layers: Collection[int]) -> None:
        """Choose the layers whose graph B computes again, from the next step on."""
        self._recomputed = {
            index: Recomputed(
                layer,
                chunk.title(index),
                self.random,
                chunk.call(index),
                self._slices,
            )
            for chunk in self.chunks.values()
            for index, layer in chunk.numbered()
            if index in layers
        }

    def begin(self, batch: MicroBatches) -> None:
        """Start a step, or its next part, which adds to the gradients so far."""
        torch.clear_autocast_cache()  # weights may have changed since they were cast
        self.ties.refresh()
        self.batch = batch
        self.loss.begin(batch)
        self._may_draw = {
            i: i not in self._quiet
            or has_hooks(self._quiet[i])
            or (i == self._last and not self.loss.draws_nothing)
            for i in self.chunks
        }
        self.outputs: dict[int, object] | None = {} if batch.keeps_outputs else None
        self._saved: dict[tuple[int, int], Saved] = {}
        self._lent = {
            i: frozenset(map(memory_of, chunk.shards))
            for i, chunk in self.chunks.items()
            if chunk.shards
        }
        """Of chunks with parameters that are gathered for passes, their memory."""
        for order in self._orders.values():
            order.begin()

    @property
    def has_loss(self) -> bool:
        """True if the stage has the last chunk."""
        return self._last in self.chunks

    def watch_weights(self, watches: Mapping[int, Progress]) -> None:
        """Let the last W's of this step's chunks tell how far they are, or all W's."""
        for chunk, progress in watches.items():
            self._orders[chunk].listen(self.batch.n_microbatches, progress)

    def discard(self) -> None:
        """Forget the forwards so far; they will run once more, with other weights."""
        torch.clear_autocast_cache()
        self._saved.clear()
        self.loss.discard()

    def end(self) -> None:
        """End a step; each forward must have had its backward."""
        if self._saved:
            raise RuntimeError(f"no backward of (chunk, micro-batch) {[*self._saved]}")

    def predict(self, chunk: int, microbatch: int, inputs: Tensors | None) -> Tensors:
        """Forward without gradients, for evaluation."""
        read = self._first_inputs(microbatch) if inputs is None else inputs
        with torch.no_grad(), self._computes:
            value = self.chunks[chunk].run(
                as_value(read), self._recomputed, self._seeds(chunk, microbatch)
            )
            outputs = mapped(self._finish(chunk, microbatch, value), handed_over)
        has_loss = self.batch.targets is not None
        # with a loss, `_finish` has kept what came before it
        if chunk == self._last and self.outputs is not None and not has_loss:
            self.outputs[microbatch] = as_value(outputs)
        return outputs

    def forward(self, chunk: int, microbatch: int, inputs: Tensors | None) -> Tensors:
        """F: run the layers (and the loss, on the last chunk); keep the graph.

        Chunk 0 reads the step's inputs. The outputs are detached; their
        ``requires_grad`` stays.
        """
        taken = self._first_inputs(microbatch) if inputs is None else leaves(inputs)
        # before the layers run: one may add what needs a gradient to another input
        asked = [x for x in taken if x.requires_grad] if chunk else []
        read, versions = taken, None
        if self._autocasts or self._slices or chunk not in self._only_reads:
            # No layer may write in place to a leaf, nor save one whose memory is freed
            # below. And autocast casts a leaf once for all its uses, whose gradients
            # would then be added in 16 bits.
            read, versions = mapped(taken, alias_of), [x._version for x in asked]
        queue = WeightQueue(self._lent.get(chunk, ()))
        with self._computes:
            value = self.chunks[chunk].run(
                as_value(read), self._recomputed, self._seeds(chunk, microbatch)
            )
            outputs = self._finish(chunk, microbatch, value)
        if versions is not None and versions == [x._version for x in asked]:
            self._only_reads.add(chunk)
        if self._slices is not None:
            for x in filter(is_sliced, asked):  # the graph keeps them, for B
                x.data = x.new_empty(()).expand_as(x)
        if chunk == self._last and not outputs[0].requires_grad:
            self._refuse_without_graph(chunk, read)
        plans, exact = self._orders[chunk].plans, self._exact_sums
        graph = SplitGraph(outputs, asked, queue, is_exact=exact, plans=plans)
        cut_off = mapped(outputs, handed_over)
        ends = cut_off if chunk == self._last else ()
        self._saved[chunk, microbatch] = Saved(graph, asked, ends)
        return cut_off

    def backward_input(
        self, chunk: int, microbatch: int, gradients: Tensors | None
    ) -> Tensors:
        """B: return the gradients of the inputs of F that need one.

        It takes those of the outputs that need one; None on the last chunk.
        """
        saved, run = self._saved[chunk, microbatch], self._orders[chunk].run_b
        return self._backward(saved, chunk, microbatch, gradients, run)

    def backward(
        self, chunk: int, microbatch: int, gradients: Tensors | None
    ) -> Tensors:
        """BW: both, in one backward; arguments and result are those of B."""
        saved, run = self._saved.pop((chunk, microbatch)), self._orders[chunk].run_bw
        return self._backward(saved, chunk, microbatch, gradients, run)

    def _backward(
        self,
        saved: Saved,
        chunk: int,
        microbatch: int,
        gradients: Tensors | None,
        run: Callable[..., Sequence[Tensor | None]],
    ) -> Tensors:
        if gradients is None:
            gradients = self.loss.gradients(saved.ends, microbatch, self.loss_scale)
        if chunk not in self.where:
            report = saved.graph.report(self.chunks[chunk].leaves_once())
            if chunk == self._last:
                refuse_foreign(report, {p for *_, p in self.named_leaves()})
            self.where[chunk] = report
        leaf_gradients = run(microbatch, saved.graph, gradients)
        self.defers = self.defers or saved.graph.defers
        input_gradients = gradients_of(saved.inputs, leaf_gradients)
        saved.inputs, saved.ends = (), ()
        return input_gradients

    def backward_weight(self, chunk: int, microbatch: int, _: None = None) -> None:
        """W: the weight gradients that B has deferred."""
        run = self._orders[chunk].run_w
        run(microbatch, self._saved.pop((chunk, microbatch)).graph)

    def begin_weight(self, chunk: int, microbatch: int, n_left: int) -> None:
        """The first of ``n_left`` parts of W, while B may still run.

        `backward_weight` does the last part.
        """
        graph = self._saved[chunk, microbatch].graph
        self._orders[chunk].begin_w(microbatch, graph, n_left)

    def batch_tensors(self, chunk: int, microbatch: int) -> list[Tensor]:
        """The tensors of the batch that a forward of this chunk reads, if any."""
        batch = self.batch
        tensors: list[Tensor] = []
        if chunk == 0 and batch.inputs is not None:
            tensors += batch.inputs[microbatch]
        if chunk == self._last and batch.targets is not None:
            tensors += tensors_in(batch.targets[microbatch])
        return tensors

    def _first_inputs(self, microbatch: int) -> Tensors:
        """The step's inputs of a micro-batch, on the device."""
        if self.batch.inputs is None:
            raise RuntimeError("the stage of the first chunk has no inputs")
        inputs = self.batch.inputs[microbatch]
        return mapped(inputs, partial(sent_ahead, device=self.device))

    def _seeds(self, chunk: int, microbatch: int) -> Callable[[int], None] | None:
        """The call that seeds the generators before each layer; None: nothing draws."""
        if not self._may_draw[chunk]:
            return None
        number = self.batch.first + microbatch
        return partial(self.random.seed_layer, self.batch.step, number)

    def _finish(self, chunk: int, microbatch: int, value: object) -> Tensors:
        """Return the output of a chunk: a value as it travels, or the loss."""
        if chunk == self._last and self.batch.targets is not None:
            if self.outputs is not None:
                detached = map_tensors(value, lambda y: handed_over(y).detach())
                self.outputs[microbatch] = detached
            value = self.loss(value, microbatch)
        return ready(as_tensors(value, self.chunks[chunk].puts_out))

    def _refuse_without_graph(self, chunk: int, inputs: Tensors) -> None:
        """Refuse a loss that depends on no trainable parameter."""
        if self.batch.targets is None:
            return
        learning = chain(inputs, self.chunks[chunk].leaves_once())
        if any(x.requires_grad for x in learning):
            raise RequestError(
                "the loss has no graph, so nothing would be learned from it; let "
                "loss_fn compute it from the outputs by torch, without detach(), "
                "item(), argmax() or no_grad()"
            )
