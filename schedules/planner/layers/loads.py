"""Load and memory of ranges of layers: what a balance weighs.

The load of a stage is the time that it is busy in a step, whatever the order:

    sum over its layers of  m (f + b + w) + optimizer        m micro-batches
                            m (2 f + b + w) + optimizer      a recomputed layer
    and over its chunks of  m (pass_f + pass_b + pass_w)     on top of the layers'
    the last layer's f holds the loss

Its memory is at least what is there all the time, and what the forwards leave of the
micro-batches that a chunk has in flight, one or more.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zbpp.core import LayerCosts, Placement, RequestError
from zbpp.core.costs.columns import per_stage

__all__ = ["Loads", "even_split"]


@dataclass(frozen=True)
class Loads:
    """Sums of the layers before each layer, and limits; L layers, C chunks, p stages.

    Args:
        time: load of the layers 0..i-1, L+1 entries from 0 on.
        fixed: memory that is there all the time, likewise.
        left: memory that forwards leave on a micro-batch, likewise.
        in_flight: micro-batches of each chunk that must fit, C entries.
        limit: memory of each stage, p entries, inf where there is none.
        placement: chunk to stage.
        each: load of a chunk on top of its layers'.
    """

    time: tuple[float, ...]
    fixed: tuple[float, ...]
    left: tuple[float, ...]
    in_flight: tuple[float, ...]
    limit: tuple[float, ...]
    placement: Placement
    each: float = 0.0

    @classmethod
    def of(
        cls,
        layers: LayerCosts,
        placement: Placement,
        n_microbatches: int,
        *,
        recompute: Collection[int] = (),
        in_flight: Sequence[float] | None = None,
    ) -> "Loads":
        """Weigh the layers.

        Args:
            layers: their times and memories.
            placement: chunk to stage.
            n_microbatches: in a step.
            recompute: layers that are recomputed.
            in_flight: micro-batches that each chunk must hold at once; None: 1.

        Raises:
            RequestError: fewer layers than chunks, or a wrong number of limits.
        """
        if layers.n_layers < placement.n_chunks:
            raise too_few(layers.n_layers, placement.n_chunks)
        rows = zip(*map(layers.of, ("f", "b", "w", "optimizer")), strict=True)
        again = set(recompute)
        times = [
            n_microbatches * (f * (1 + (i in again)) + b + w) + step
            for i, (f, b, w, step) in enumerate(rows)
        ]
        times[-1] += n_microbatches * layers.loss
        m_b, m_r = layers.of("m_b"), layers.of("m_r")
        left = [m_r[i] if i in again else m_b[i] for i in range(layers.n_layers)]
        return cls(
            time=_sums(times),
            fixed=_sums(layers.of("m_fixed")),
            left=_sums(left),
            in_flight=tuple(in_flight or (1.0,) * placement.n_chunks),
            limit=per_stage(layers.limit, placement),
            placement=placement,
            each=n_microbatches * (layers.pass_f + layers.pass_b + layers.pass_w),
        )

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.time) - 1

    @property
    def is_limited(self) -> bool:
        """True if a stage has a memory limit."""
        return min(self.limit) < math.inf

    @property
    def total(self) -> float:
        """Load of all stages together."""
        return self.time[-1] + self.placement.n_chunks * self.each

    def busy(self, first: int, end: int) -> float:
        """Load of a chunk of the layers first..end-1."""
        return self.time[end] - self.time[first] + self.each

    def held(self, chunk: int, first: int, end: int) -> float:
        """Memory of a chunk of these layers."""
        left = self.left[end] - self.left[first]
        return self.fixed[end] - self.fixed[first] + self.in_flight[chunk] * left

    def by_stage(self, split: Sequence[int]) -> tuple[list[float], list[float]]:
        """Load and memory of each stage."""
        ends = list(accumulate(split, initial=0))
        busy = [0.0] * self.placement.n_stages
        held = [0.0] * self.placement.n_stages
        for chunk, stage in enumerate(self.placement.stage_of):
            busy[stage] += self.busy(ends[chunk], ends[chunk + 1])
            held[stage] += self.held(chunk, ends[chunk], ends[chunk + 1])
        return busy, held

    def fits(self, split: Sequence[int]) -> bool:
        """True if no stage exceeds its limit."""
        _, held = self.by_stage(split)
        return all(
            one <= roomy(limit) for one, limit in zip(held, self.limit, strict=True)
        )

    @property
    def least(self) -> float:
        """Lower bound of the largest load: the mean, and the heaviest stage's layers.

        Every chunk has a layer, so a stage has as many as it has chunks.
        """
        each = sorted(self.busy(i, i + 1) for i in range(self.n_layers))
        fewest = min(map(len, self.placement.chunks_of))
        heaviest = each[-1] + sum(each[: fewest - 1])
        return max(self.total / self.placement.n_stages, heaviest)


def even_split(n_layers: int, n_chunks: int) -> tuple[int, ...]:
    """Deal layers by their number; the first chunks get one more.

    >>> even_split(7, 3)
    (3, 2, 2)

    Raises:
        RequestError: fewer layers than chunks.
    """
    if n_layers < n_chunks:
        raise too_few(n_layers, n_chunks)
    base, more = divmod(n_layers, n_chunks)
    return tuple(base + (chunk < more) for chunk in range(n_chunks))


def roomy(limit: float) -> float:
    """A limit with room for rounding, as the schedule's own check has."""
    return limit * (1 + 1e-9)


def too_few(n_layers: int, n_chunks: int) -> RequestError:
    """More chunks than layers."""
    return RequestError(
        f"{n_layers} layers cannot fill {n_chunks} chunks, one each at least; use "
        "fewer stages, or a mode with fewer chunks a stage"
    )


def _sums(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(accumulate(values, initial=0.0))
