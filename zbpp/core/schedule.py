"""The order of jobs on every stage; an invalid one cannot exist.

Recompute makes B longer, and changes the memory that passes keep. Costs per chunk that
users give, measure or estimate are those without recompute; only `recomputed` computes
the others from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zbpp.core.costs import ChunkCosts, Costs
from zbpp.core.errors import RequestError
from zbpp.core.graph import LanesOfParts, lanes_of_parts
from zbpp.core.jobs import (
    KINDS,
    Check,
    Collective,
    Job,
    PassKind,
    passes_in,
)
from zbpp.core.layers import chunk_layers
from zbpp.core.placement import Placement, ranges_of
from zbpp.core.timeline import Slot, Timeline
from zbpp.core.validation import (
    Recompute,
    check_layers,
    check_parts,
    validate,
)

Order = tuple[Job, ...]
"""The jobs of one stage, in the order in which it runs them."""


@dataclass(frozen=True)
class Schedule:
    """Orders of jobs on all stages, without times: those belong to `Timeline`.

    Args:
        name: the mode, for people.
        placement: chunk to stage.
        n_microbatches: micro-batches in a step, at least 1.
        orders: one order per stage.
        split: layers of each chunk that it was planned for; None: any.
        recompute: for each chunk True if B computes all its layers again, False, or
            the layers, counted from 0 in the chunk, that it does so with; None: none.
        parts: per stage the parts of its passes, and its other jobs, in the order of
            their starts: each lane runs those on it in this order. ``orders`` has the
            passes in the order of their starts. None: every pass in one piece.

    Raises:
        ScheduleError: a pass is missing, doubled, on a wrong stage or before its
            input; or the stages wait for one another.
        RequestError: split or recompute do not fit the chunks.
    """

    name: str
    placement: Placement
    n_microbatches: int
    orders: tuple[Order, ...]
    split: tuple[int, ...] | None = None
    recompute: tuple[Recompute, ...] | None = None
    parts: tuple[Order, ...] | None = None

    def __post_init__(self) -> None:
        check_layers(self.placement, self.split, self.recompute)
        validate(self.placement, self.n_microbatches, self.orders)
        if self.parts is not None:
            check_parts(self.placement, self.orders, self.parts)

    @property
    def n_stages(self) -> int:
        """Number of stages."""
        return self.placement.n_stages

    @property
    def is_post_validated(self) -> bool:
        """True if steps are validated in the next warm-up: all stages have a V."""
        return any(isinstance(job, Check) for job in self.orders[0])

    def without(self, kind: type[Check] | type[Collective]) -> "Schedule":
        """The same without V's, or without collectives."""
        rows = (self.orders, self.parts or ())
        orders, parts = (
            tuple(tuple(job for job in row if not isinstance(job, kind)) for row in x)
            for x in rows
        )
        if orders == self.orders:
            return self
        return replace(self, orders=orders, parts=parts or None)

    def rows_for(self, times: ChunkCosts) -> tuple[Order, ...]:
        """The jobs of each stage: parts where the costs have them too, else passes.

        Raises:
            RequestError: the passes have other parts there.
        """
        if self.parts is None or not times.parts:
            return self.orders
        for chunk, parts in enumerate(times.parts):
            for kind in (PassKind.F, PassKind.B, PassKind.W):
                has = list(self._lanes.get((kind, chunk), {}).values())
                wanted = [lane for lane, _ in parts.of(kind)]
                if has != wanted:
                    texts = (", ".join(x) or "no parts" for x in (has, wanted))
                    raise RequestError(
                        "the schedule runs {}, but the costs have {} for {} of chunk "
                        "{}; plan again with these costs".format(*texts, kind, chunk)
                    )
        return self.parts

    @cached_property
    def _lanes(self) -> LanesOfParts:
        return lanes_of_parts(self.parts or ())

    def recomputed_layers(self, split: Sequence[int]) -> frozenset[int]:
        """Layers of the whole model that B computes again, split into the chunks."""
        recomputed: set[int] = set()
        pairs = zip(self.recompute or (), ranges_of(split), strict=False)
        for chunk, (which, here) in enumerate(pairs):
            chosen = () if isinstance(which, bool) else which
            layers = here if which is True else [here.start + i for i in chosen]
            if layers and max(layers) >= here.stop:
                raise RequestError(
                    f"layer {max(chosen)} of chunk {chunk} is to be recomputed, but "
                    f"the chunk has {len(here)} layers; plan for this split, or give "
                    f"the schedule's: {list(self.split or ()) or 'it has none'}"
                )
            recomputed.update(layers)
        return frozenset(recomputed)

    @property
    def recomputing(self) -> frozenset[int]:
        """Chunks whose B computes layers again."""
        which = self.recompute or ()
        return frozenset(chunk for chunk, layers in enumerate(which) if layers)

    def timeline(self, rows: Sequence[Sequence[Slot]]) -> Timeline:
        """Make a timeline of the jobs of a step, of each stage in its order.

        RESHARD and REDUCE_WAIT take no time, and are left out.
        """
        slots = tuple(
            tuple(slot for slot in row if KINDS[slot.job.kind].times) for row in rows
        )
        return Timeline(
            self.name, self.placement, self.n_microbatches, slots, self.recomputing
        )

    def runs(self, kind: PassKind) -> bool:
        """True if there is a pass of this kind."""
        return any(
            part.kind is kind
            for order in self.orders
            for job in order
            for part in passes_in(job)
        )


def recomputed(costs: Costs, schedule: Schedule) -> Costs:
    """Costs of a schedule's passes, including its recompute.

    Of a chunk whose layers are recomputed in part, all layers count as equal. Without
    ``m_r``, and with no limit to keep, a part that is recomputed leaves nothing.

    Args:
        costs: of the chunks without recompute.
        schedule: names what is recomputed; without that the costs stay as they are.

    Raises:
        RequestError: the costs do not fit the placement; m_r is missing where there is
            a limit; a chunk is recomputed in part and its layers are not known; or its
            parts are not those of as many equal layers.
    """
    if schedule.recompute is None or not any(schedule.recompute):
        return costs
    split = schedule.split or (1,) * schedule.placement.n_chunks
    if schedule.split is None and any(
        not isinstance(which, bool) for which in schedule.recompute
    ):
        raise RequestError(
            f"{schedule.name} recomputes some layers of a chunk, and does not name how "
            "many it has; plan it with --layers, so that it has a split"
        )
    layers = chunk_layers(costs, schedule.placement, split)
    again = schedule.recomputed_layers(split)
    m = schedule.n_microbatches
    return layers.on(schedule.placement, split, n_microbatches=m, recompute=again)
