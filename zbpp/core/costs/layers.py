"""Times and memories per layer: they give those of the chunks of any split.

Layers run one after the other, so times and what passes leave are added up. A pass
takes some time whatever is in it (to cut the graph, to send, to wake up): the time of
a chunk is that of its layers and one such overhead. A peak stands on what the layers
before it in the pass have left:

    F of a chunk    layer 0 | 1 | 2      peak = max of (left by 0..i-1) + peak_f of i
    B               layer 2 | 1 | 0      the same from the last layer on

A layer that is recomputed leaves ``m_r`` after F, and computes the rest again in B: it
then takes f longer, and its peak stands on m_b instead of m_r.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise

from zbpp.core.costs.dealing import (
    MOST_LIMIT,
    PerChunk,
    check_memory_unit,
    check_numbers,
)
from zbpp.core.costs.links import edge_delays
from zbpp.core.costs.memory_model import MemoryModel
from zbpp.core.costs.times import Costs
from zbpp.core.errors import RequestError
from zbpp.core.placement import Placement

__all__ = ["LayerCosts", "PerLayer"]

PerLayer = float | tuple[float, ...]
"""Every layer's value, or one per layer."""

_TIMES = ("f", "b", "w", "optimizer", "all_gather", "reduce_scatter")
_OF_LAYERS = (*_TIMES, "m_b", "m_w", "m_fixed", "peak_o", "parameters")
_OF_CUTS = ("comm", "message", "send_occupies")
_MAYBE_OF_LAYERS = ("peak_f", "peak_b", "peak_w", "m_r", "peak_r")
_MEMORIES = ("m_b", "m_w", "m_fixed", "peak_o", "parameters", *_MAYBE_OF_LAYERS)


@dataclass(frozen=True)
class LayerCosts:
    """Times and memories of the layers of a model.

    The fields mean for a layer what those of `Costs` and `MemoryModel` mean for a
    chunk; a number stands for every layer. Besides:

    Args:
        n_layers: layers of the model.
        peak_r: most that F of a recomputed layer needs; None: as much as peak_f.
        comm: time of a message; a list has one entry per boundary between two layers,
            n_layers - 1.
        send_occupies: part of that for which the sender computes nothing, likewise.
        message: bytes of a message, likewise; they take message / bandwidth.
        bandwidth: bytes in a unit of time, of all links or as in
            `zbpp.core.costs.links`; None: messages take ``comm`` alone.
        delay: of a link, on top of that; likewise.
        pass_f, pass_b, pass_w: time of every F, B and W of a chunk on top of its
            layers', so that many chunks a stage take longer than few.
        loss: time of the loss, a part of the last layer's F; its backward, and its
            memory, are in b, m_b, m_w and the peaks of the last layer.
        limit: memory of a stage, as in `MemoryModel`.
        memory_unit: as there.
        parameters: memory of the parameters, a part of m_fixed; so much, and as much of
            gradients, do replicas of a stage exchange.
        replica_bandwidth: bytes in a unit of time between replicas; None: bandwidth.
        replica_delay: of a link between replicas, on top of that.

    Raises:
        RequestError: a list of another length, or a number that is none.
    """

    n_layers: int
    f: PerLayer = 1.0
    b: PerLayer = 1.0
    w: PerLayer = 1.0
    optimizer: PerLayer = 0.0
    m_b: PerLayer = 1.0
    m_w: PerLayer = 0.5
    m_fixed: PerLayer = 0.0
    peak_f: PerLayer | None = None
    peak_b: PerLayer | None = None
    peak_w: PerLayer | None = None
    peak_o: PerLayer = 0.0
    m_r: PerLayer | None = None
    peak_r: PerLayer | None = None
    comm: PerLayer = 0.0
    message: PerLayer = 0.0
    bandwidth: PerChunk | None = None
    delay: PerChunk = 0.0
    pass_f: float = 0.0
    pass_b: float = 0.0
    pass_w: float = 0.0
    loss: float = 0.0
    reduction: float | None = None
    validation: float = 0.0
    limit: PerChunk | None = None
    all_gather: PerLayer = 0.0
    reduce_scatter: PerLayer = 0.0
    parameters: PerLayer = 0.0
    replica_bandwidth: float | None = None
    replica_delay: float = 0.0
    send_occupies: PerLayer = 0.0
    memory_unit: str | None = None

    def __post_init__(self) -> None:
        if self.n_layers < 1:
            raise RequestError(f"n_layers is {self.n_layers}; it must be at least 1")
        check_memory_unit(self.memory_unit)
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or field.name in ("n_layers", "memory_unit"):
                continue
            if field.name == "limit":
                check_numbers("memory_limit", value, most=MOST_LIMIT)
                continue
            check_numbers(field.name, value)
            if "bandwidth" in field.name and not _all_positive(value):
                raise RequestError(f"{field.name} is {value!r}; it must be above 0")
            n = self.n_layers
            if field.name in _OF_CUTS:
                n -= 1
            elif field.name not in (*_OF_LAYERS, *_MAYBE_OF_LAYERS):
                continue
            if isinstance(value, tuple) and len(value) != n:
                what = "layers" if n == self.n_layers else "boundaries between layers"
                raise RequestError(
                    f"{field.name} has {len(value)} entries for {n} {what}; give one "
                    "number, or one for each"
                )

    def with_memory_of(self, other: "LayerCosts") -> "LayerCosts":
        """Join the times of one with the memories of another, but for the limit.

        Raises:
            RequestError: they are of different numbers of layers.
        """
        if other.n_layers != self.n_layers:
            raise RequestError(
                f"times are of {self.n_layers} layers, memories of {other.n_layers}"
            )
        names = (*_MEMORIES, "memory_unit")
        return replace(self, **{name: getattr(other, name) for name in names})

    def of(self, name: str) -> tuple[float, ...]:
        """One entry per layer; peaks that are not given follow from the rest."""
        value = getattr(self, name)
        if value is not None:
            given = value if isinstance(value, tuple) else (value,) * self.n_layers
            if name not in ("peak_f", "peak_b"):
                return given
            least = self._least(name)
            return tuple(max(pair) for pair in zip(given, least, strict=True))
        if name in ("peak_f", "peak_b"):
            return self._least(name)
        if name == "peak_r":
            return self.of("peak_f")
        return (0.0,) * self.n_layers

    def _least(self, name: str) -> tuple[float, ...]:
        if name == "peak_f":
            return self.of("m_b")
        pairs = zip(self.of("m_b"), self.of("m_w"), strict=True)
        return tuple(max(0.0, w - b) for b, w in pairs)

    def on(
        self,
        placement: Placement,
        split: Sequence[int],
        *,
        recompute: Collection[int] = (),
    ) -> tuple[Costs, MemoryModel]:
        """Costs and memory of the chunks of a split.

        Args:
            placement: chunk to stage.
            split: layers of each chunk, in the order of the chunks.
            recompute: layers that are recomputed.

        Raises:
            RequestError: the split does not fit, or a layer cannot be recomputed.
        """
        if (
            len(split) != placement.n_chunks
            or min(split) < 1
            or sum(split) != self.n_layers
        ):
            raise RequestError(
                f"split {list(split)} must have {placement.n_chunks} entries from 1 on "
                f"that add up to {self.n_layers} layers"
            )
        if recompute and self.m_r is None:
            raise RequestError(
                "there is no m_r (what F leaves of a recomputed layer), so nothing can "
                "be recomputed; add it to the costs of the layers"
            )
        outside = [i for i in recompute if not 0 <= i < self.n_layers]
        if outside:
            raise RequestError(
                f"layer {outside[0]} shall be recomputed; the layers are 0 to "
                f"{self.n_layers - 1}"
            )
        ends = list(accumulate(split, initial=0))
        chunks = [range(first, end) for first, end in pairwise(ends)]
        again = set(recompute)
        times = {name: self.of(name) for name in _TIMES}
        times["b"] = tuple(
            b + (f if i in again else 0.0)
            for i, (f, b) in enumerate(zip(times["f"], times["b"], strict=True))
        )
        sums = {
            name: tuple(sum(values[i] for i in own) for own in chunks)
            for name, values in times.items()
        }
        costs = Costs(
            f=tuple(one + self.pass_f for one in sums["f"]),
            b=tuple(one + self.pass_b for one in sums["b"]),
            w=tuple(one + self.pass_w for one in sums["w"]),
            optimizer=sums["optimizer"],
            comm=self._edges(placement, [end - 1 for end in ends[1:-1]]),
            send_occupies=self._sending([end - 1 for end in ends[1:-1]]),
            loss=self.loss,
            reduction=self.reduction,
            validation=self.validation,
            all_gather=sums["all_gather"] if self.all_gather else 0.0,
            reduce_scatter=sums["reduce_scatter"] if self.reduce_scatter else 0.0,
        )
        return costs, self._memory(chunks, again)

    def _edges(self, placement: Placement, cuts: Sequence[int]) -> PerChunk:
        """Time of a message on each edge between chunks; cuts are after these layers.

        One chunk has no edge: then it is a number, not a list of none.
        """
        n = len(cuts)
        if n == 0:
            return 0.0
        comm, message = (
            value if isinstance(value, tuple) else (value,) * (self.n_layers - 1)
            for value in (self.comm, self.message)
        )
        delays = edge_delays(self.delay, placement)
        slowness = (0.0,) * n
        if self.bandwidth is not None:
            band = self.bandwidth
            per_byte = (
                tuple(1 / one for one in band) if isinstance(band, tuple) else 1 / band
            )
            slowness = edge_delays(per_byte, placement)
        return tuple(
            comm[cut] + delay + message[cut] * slow
            for cut, delay, slow in zip(cuts, delays, slowness, strict=True)
        )

    def _sending(self, cuts: Sequence[int]) -> PerChunk:
        """Likewise, for which a message occupies its sender."""
        value = self.send_occupies
        if not isinstance(value, tuple):
            return value
        return tuple(value[cut] for cut in cuts) or 0.0

    def _memory(self, chunks: Sequence[range], again: set[int]) -> MemoryModel:
        m_b, m_w, m_r, f, b, w, r = (
            self.of(name)
            for name in ("m_b", "m_w", "m_r", "peak_f", "peak_b", "peak_w", "peak_r")
        )
        left = [m_r[i] if i in again else m_b[i] for i in range(self.n_layers)]
        in_f = [max(r[i], m_r[i]) if i in again else f[i] for i in range(self.n_layers)]
        in_b = [
            max(f[i] - m_r[i], m_b[i] - m_r[i] + b[i]) if i in again else b[i]
            for i in range(self.n_layers)
        ]
        change = [m_w[i] - left[i] for i in range(self.n_layers)]
        freed = [-one for one in m_w]
        fixed, peak_o = self.of("m_fixed"), self.of("peak_o")
        return MemoryModel(
            m_b=tuple(sum(left[i] for i in own) for own in chunks),
            m_w=tuple(sum(m_w[i] for i in own) for own in chunks),
            limit=self.limit,
            memory_unit=self.memory_unit,
            m_fixed=tuple(sum(fixed[i] for i in own) for own in chunks),
            peak_f=tuple(_peak(own, in_f, left) for own in chunks),
            peak_b=tuple(_peak(own[::-1], in_b, change) for own in chunks),
            peak_w=tuple(_peak(own[::-1], w, freed) for own in chunks),
            peak_o=tuple(sum(peak_o[i] for i in own) for own in chunks),
        )


def _all_positive(value: PerChunk) -> bool:
    return min(value if isinstance(value, tuple) else (value,)) > 0


def _peak(order: range, peak: Sequence[float], change: Sequence[float]) -> float:
    """Most that is held above the start while layers run in an order."""
    held = most = 0.0
    for layer in order:
        most = max(most, held + peak[layer])
        held += change[layer]
    return max(most, held)
