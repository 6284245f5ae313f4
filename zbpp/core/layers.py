"""Times and memories per layer, from which those of the chunks of any split follow.

Layers run one after the other, so times and the memory that passes leave are added up.
Every pass takes some time besides its layers (to cut the graph, to send, to wake up):
the time of a chunk is that of its layers and one such overhead. A peak is above the
memory that the layers before it in the pass have left:

    F of a chunk    layer 0 | 1 | 2      peak = max of (left by 0..i-1) + peak_f of i
    B               layer 2 | 1 | 0      the same from the last layer on

A layer that is recomputed leaves ``m_r`` after F, and computes the rest again in B: it
then takes f longer, and its peak is above m_b instead of m_r.

Parts of layers follow one another as their passes do. Those of W are joined, as it runs
in one piece; so is a forward that is run again in B: nothing hides its communication.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from operator import add, sub
from typing import Any

import numpy as np

from zbpp.core.columns import (
    Per,
    PerRow,
    column,
    columns_of,
    spread,
    whole_number,
)
from zbpp.core.costs import Costs, Table
from zbpp.core.errors import RequestError
from zbpp.core.jobs import KINDS, Lane, PassKind
from zbpp.core.parts import Parts, PartTimes
from zbpp.core.placement import Placement, check_split, ranges_of

_SUMMED = ("optimizer", "m_b", "m_w", "m_fixed", "peak_o")
"""Columns of a chunk that are the sums of those of its layers."""
_REPLICAS = ("all_gather", "reduce_scatter")
"""The same of what replicas exchange, where they do."""
_TIMED = ("f", "b", "w", "optimizer")
"""Columns whose times are divided by the speed of a stage."""
_SAME = ("loss", "reduction", "validation", "memory_limit")
"""Fields that are neither of chunks nor of layers."""


@dataclass(frozen=True)
class _Count:
    n_layers: int


@dataclass(frozen=True)
class LayerCosts(Table, _Count):
    """Times and memories of the layers of a model: those of `Table`, and these.

    A number is that of every layer.

    Args:
        n_layers: layers of the model.
        message: bytes of a message; a list has one entry per boundary between two
            layers, n_layers - 1. They take message / bandwidth.
        messages_at_once: messages that a stage has room for all the time, each as
            large as its largest.
        keeps_sent: messages stay until the end of the step that sends them.
        batch: memory of a micro-batch's inputs or targets, where a layer reads them;
            those of all micro-batches are there all the time.
        whole_gradients: memory of gradients that replicas have whole from a W to the
            end of its sum: of a chunk at a time.
        whole_parameters: memory of parameters that replicas have whole in a pass: of a
            layer at a time.
        bandwidth: bytes in a unit of time, of all links or of each
            (`zbpp.core.columns`); None: messages take ``comm`` alone.
        delay: of a link, on top of that; of all links or of each.
        pass_f: time of every F of a chunk on top of its layers', so that many chunks a
            stage take longer than few.
        pass_b: the same of every B.
        pass_w: the same of every W.
        parameters: memory of the parameters, a part of m_fixed; so much, and as much of
            gradients, do replicas of a stage exchange.
        replica_bandwidth: bytes in a unit of time between replicas; None: bandwidth.
        replica_delay: of a link between replicas, on top of that.
        tied: parameters that layers share, each as the layers, the memory that is fixed
            for it (with gradient and optimizer state), what an optimizer step needs for
            it, and its size. ``m_fixed`` and ``peak_o`` of the first layer have it;
            every other stage with such a layer has it too.

    Raises:
        RequestError: as `Table`, or a list has another length.
    """

    message: PerRow = column(0.0, Per.EDGE, is_memory=True)
    messages_at_once: float = column(0.0, Per.ALL, is_memory=True)
    keeps_sent: bool = column(False, Per.ALL, is_memory=True, is_flag=True)
    batch: PerRow = column(0.0, Per.ROW, is_memory=True)
    whole_gradients: PerRow = column(0.0, Per.ROW, is_memory=True)
    whole_parameters: PerRow = column(0.0, Per.ROW, is_memory=True)
    bandwidth: PerRow | None = column(None, Per.LINK, is_rate=True)
    delay: PerRow = column(0.0, Per.LINK)
    pass_f: float = column(0.0, Per.ALL)
    pass_b: float = column(0.0, Per.ALL)
    pass_w: float = column(0.0, Per.ALL)
    parameters: PerRow = column(0.0, Per.ROW, is_memory=True)
    replica_bandwidth: float | None = column(None, Per.ALL, is_rate=True)
    replica_delay: float = column(0.0, Per.ALL)
    tied: tuple[tuple[tuple[int, ...], float, float, float], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_layers", whole_number("n_layers", self.n_layers))
        if self.n_layers < 1:
            raise RequestError(f"n_layers is {self.n_layers}; it must be at least 1")
        tied = tuple((tuple(layers), *sizes) for layers, *sizes in self.tied)
        object.__setattr__(self, "tied", tied)
        parts = self.parts
        if not isinstance(parts, Parts | None) and len(parts) != self.n_layers:
            raise RequestError(
                f"parts has {len(parts)} entries for {self.n_layers} layers; give one "
                "for each, or one object for every layer"
            )
        self._check(self.n_layers)

    def parts_of(self, layer: int) -> Parts:
        """The parts of a layer's passes; there must be parts."""
        assert self.parts is not None
        return self.parts[layer] if isinstance(self.parts, tuple) else self.parts

    def computing(self, kind: PassKind) -> tuple[float, ...]:
        """Times for which the layers' F, B or W compute, without their exchanges."""
        if self.parts is None:
            (name,) = KINDS[kind].times
            return self.of(name)
        layers = range(self.n_layers)
        return tuple(self.parts_of(i).on_lane(kind, Lane.COMPUTE) for i in layers)

    def of(self, name: str) -> tuple[float, ...]:
        """One entry per layer; 0 for None."""
        value = getattr(self, name) or 0.0
        return value if isinstance(value, tuple) else (value,) * self.n_layers

    def on(
        self,
        placement: Placement,
        split: Sequence[int],
        *,
        n_microbatches: int,
        recompute: Collection[int] = (),
    ) -> Costs:
        """Costs of the chunks of a split.

        Args:
            placement: chunk to stage.
            split: layers of each chunk, in the order of the chunks.
            n_microbatches: of a step; their inputs and targets are there all the time.
            recompute: layers that are recomputed.

        Raises:
            RequestError: the split does not fit, or a layer cannot be recomputed.
        """
        check_split(split, self.n_layers, placement.n_chunks)
        if recompute and self.m_r is None and self.memory_limit is not None:
            raise RequestError(
                "there is a memory limit, but no m_r, the memory that F leaves of a "
                "recomputed part (usually its input); add it to the costs"
            )
        outside = [i for i in recompute if not 0 <= i < self.n_layers]
        if outside:
            raise RequestError(
                f"layer {outside[0]} is to be recomputed; the layers are 0 to "
                f"{self.n_layers - 1}"
            )
        chunks = ranges_of(split)
        cuts = [chunk[-1] for chunk in chunks[:-1]]
        columns = self._columns(recompute)
        columns["m_fixed"] = [*self.fixed(n_microbatches)]

        def total(name: str) -> tuple[float, ...]:
            column = columns[name]
            return tuple(sum(column[i] for i in chunk) for chunk in chunks)

        fields: dict[str, Any] = {name: getattr(self, name) for name in _SAME}
        fields |= {name: total(name) for name in _SUMMED}
        fields |= {name: total(name) for name in _REPLICAS if getattr(self, name)}
        if self.tied:
            self._add_ties(fields, placement, chunks)
        fixed = list(fields["m_fixed"])
        messages = self.messages_on(placement, chunks, n_microbatches)
        whole = self.whole_on(placement, chunks)
        for on_stage, *more in zip(placement.chunks_of, messages, whole, strict=True):
            fixed[on_stage[0]] += sum(more)
        fields["m_fixed"] = tuple(fixed)
        m_b, m_w = columns["m_b"], columns["m_w"]
        left = {"f": m_b, "b": [*map(sub, m_w, m_b)], "w": [-memory for memory in m_w]}
        for name, change in left.items():
            more, peak = getattr(self, f"pass_{name}"), columns[f"peak_{name}"]
            fields[name] = tuple(time + more for time in total(name))
            fields[f"peak_{name}"] = tuple(
                _peak(chunk if name == "f" else chunk[::-1], peak, change)
                for chunk in chunks
            )
        if self.parts is not None:
            fields["parts"] = tuple(self._chunk_parts(x, recompute) for x in chunks)
        return Costs(**fields, comm=self._edges(placement, cuts))

    def fixed(self, n_microbatches: int) -> tuple[float, ...]:
        """Memory of each layer that is there all the time of a step, with its batch."""
        batch = (n_microbatches * size for size in self.of("batch"))
        return tuple(map(add, self.of("m_fixed"), batch))

    def messages_on(
        self, placement: Placement, chunks: Sequence[range], n_microbatches: int
    ) -> tuple[float, ...]:
        """Memory of the messages that each stage sends and receives."""
        sizes: list[list[float]] = [[0.0] for _ in range(placement.n_stages)]
        message = self._of_edges("message")
        for ends, chunk in zip(pairwise(placement.stage_of), chunks, strict=False):
            if ends[0] != ends[1]:
                for stage in ends:
                    sizes[stage].append(message[chunk[-1]])
        n_sent = n_microbatches if self.keeps_sent else 0
        return tuple(self.messages_at_once * max(x) + n_sent * sum(x) for x in sizes)

    def whole_on(
        self, placement: Placement, chunks: Sequence[range]
    ) -> tuple[float, ...]:
        """Memory that each stage needs for gathered parameters and gradients."""
        gradients, parameters = map(self.of, ("whole_gradients", "whole_parameters"))
        return tuple(
            max(sum(gradients[i] for i in chunks[chunk]) for chunk in on_stage)
            + max(parameters[i] for chunk in on_stage for i in chunks[chunk])
            for on_stage in placement.chunks_of
        )

    def _add_ties(
        self, fields: dict[str, Any], placement: Placement, chunks: Sequence[range]
    ) -> None:
        """Add the memory of parameters that stages share with other stages.

        Each has the parameter, and keeps the gradient that it has sent; those that it
        has received are there before the optimizer steps.
        """
        fixed, in_step = list(fields["m_fixed"]), list(fields["peak_o"])
        received = [0.0] * placement.n_stages
        for layers, amount, step, size in self.tied:
            first: dict[int, int] = {}  # by stage its first chunk with such a layer
            n_layers = Counter[int]()
            for chunk, stage in enumerate(placement.stage_of):
                if n := sum(i in chunks[chunk] for i in layers):
                    first.setdefault(stage, chunk)
                    n_layers[stage] += n
            for nth, (stage, chunk) in enumerate(first.items()):
                if len(first) > 1:
                    fixed[chunk] += size + (amount if nth else 0.0)
                    in_step[chunk] += step if nth else 0.0
                    received[stage] += size * (len(layers) - n_layers[stage])
        for on_stage, most in zip(placement.chunks_of, received, strict=True):
            in_step[on_stage[0]] += max(0.0, most - sum(in_step[c] for c in on_stage))
        fields |= {"m_fixed": tuple(fixed), "peak_o": tuple(in_step)}

    def _chunk_parts(self, chunk: range, recompute: Collection[int]) -> Parts:
        """The parts of a chunk's passes, each after the overhead of the pass."""

        def of(kind: PassKind, layer: int) -> PartTimes:
            parts = self.parts_of(layer)
            again = kind is PassKind.B and layer in recompute
            forward = ((Lane.COMPUTE, parts.time(PassKind.F)),) if again else ()
            return forward + parts.of(kind)

        f = chain.from_iterable(of(PassKind.F, i) for i in chunk)
        b = chain.from_iterable(of(PassKind.B, i) for i in reversed(chunk))
        w = self.pass_w + sum(self.parts_of(i).time(PassKind.W) for i in chunk)
        return Parts(
            ((Lane.COMPUTE, self.pass_f), *f),
            ((Lane.COMPUTE, self.pass_b), *b),
            ((Lane.COMPUTE, w),),
        )

    def _columns(self, recompute: Collection[int]) -> dict[str, list[float]]:
        """Each column with an entry a layer, as it is where some are recomputed."""
        columns = {
            name: list(self.of(name))
            for name, about in columns_of(LayerCosts).items()
            if about.per is Per.ROW
        }
        peak_f, peak_b, m_b = columns["peak_f"], columns["peak_b"], columns["m_b"]
        for i in set(recompute):
            m_r = columns["m_r"][i]
            peak_b[i] = max(peak_f[i] - m_r, m_b[i] - m_r + peak_b[i])
            m_b[i] = m_r
            columns["b"][i] += columns["f"][i]
        return columns

    def _of_edges(self, name: str) -> tuple[float, ...]:
        """One entry per boundary between two layers."""
        value = getattr(self, name)
        return value if isinstance(value, tuple) else (value,) * (self.n_layers - 1)

    def _edges(self, placement: Placement, cuts: Sequence[int]) -> PerRow:
        """Time of a message on each edge between chunks; cuts are after these layers.

        One chunk has no edge: then it is a number, not a list of none.
        """
        comm, message = map(self._of_edges, ("comm", "message"))
        delays = spread(self, "delay", placement)
        bands = spread(self, "bandwidth", placement, math.inf)
        return (
            tuple(
                comm[cut] + delay + message[cut] / band
                for cut, delay, band in zip(cuts, delays, bands, strict=True)
            )
            or 0.0
        )


def _peak(order: range, peak: Sequence[float], change: Sequence[float]) -> float:
    """Most memory above that at the start while layers run in an order."""
    memory = most = 0.0
    for layer in order:
        most = max(most, memory + max(peak[layer], change[layer]))
        memory += change[layer]
    return most


def chunk_layers(
    costs: Costs, placement: Placement, split: Sequence[int] | None = None
) -> LayerCosts:
    """Costs of layers whose sums are the costs of the chunks, on this placement.

    The layers of a chunk are assumed to be equal: each has an equal share of its times
    and of the memory that its passes leave. Above that, a pass needs as much in one
    layer as in the chunk (temporaries follow one another). Without a split every chunk
    is one layer.
    """
    if costs.splits is not None and not all(costs.splits):
        raise RequestError(
            f"stage {costs.splits.index(False)} cannot split its backward (splits of "
            "the costs), and recompute needs that; leave out splits or recompute"
        )
    counts = np.array(split or (1,) * placement.n_chunks)
    chunk_of = np.repeat(np.arange(placement.n_chunks), counts)

    def of(name: str) -> Any:
        return np.array(spread(costs, name, placement))

    def layers(column: Any) -> Any:
        return tuple(column[chunk_of].tolist())

    speed = np.array(spread(costs, "speed", placement, 1.0))[list(placement.stage_of)]
    values = {name: getattr(costs, name) for name in _SAME}
    for name in (*_TIMED, *_REPLICAS, "m_b", "m_w", "m_fixed", "m_r", "peak_o"):
        if getattr(costs, name) is not None:
            column = of(name) / speed if name in _TIMED else of(name)
            values[name] = layers(column / counts)
    # Above what it leaves, a pass needs as much in one layer as in the chunk.
    m_b, m_w = of("m_b"), of("m_w")
    rises = np.maximum(0.0, m_w - m_b)
    for name, left in ("peak_f", m_b), ("peak_b", rises), ("peak_w", 0 * m_w):
        if getattr(costs, name) is not None:
            values[name] = layers(left / counts + np.maximum(of(name), left) - left)
    comm = np.zeros(len(chunk_of) - 1)
    comm[np.flatnonzero(np.diff(chunk_of))] = of("comm")
    values["comm"] = tuple(comm.tolist()) or 0.0
    parts = _layer_parts(costs, placement, counts.tolist())
    return LayerCosts(n_layers=len(chunk_of), parts=parts, **values)


def _layer_parts(
    costs: Costs, placement: Placement, counts: Sequence[int]
) -> tuple[Parts, ...] | None:
    """Parts of the layers of each chunk, which must be those of equal layers."""
    layers: list[Parts] = []
    each = zip(costs.parts_on(placement), counts, strict=False)
    for chunk, (parts, n) in enumerate(each):
        if parts.layers % n:
            raise RequestError(
                f"parts: chunk {chunk} has parts of {parts.layers} equal layers, which "
                f"do not divide among the {n} of the split; give costs of layers "
                "(--layers) with parts of each, or take 'parts' out of the costs"
            )
        layers += [replace(parts, layers=parts.layers // n).flat()] * n
    return tuple(layers) or None
