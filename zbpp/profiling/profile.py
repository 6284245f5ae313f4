"""The result of a profile: costs per layer, per chunk, and how sure they are."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import quantiles
from typing import Any, NamedTuple

from zbpp.core import Costs, Lane, LayerCosts, PassKind, Placement
from zbpp.profiling.links import FASTEST, Link
from zbpp.profiling.stopwatch import robust_mean

__all__ = ["ChunkProfile", "Profile", "Spread", "spread"]

_KINDS = ("F", "B", "W", "BW")


class Spread(NamedTuple):
    """Quartiles of some times, and the mean that costs are made of, in ms."""

    low: float
    median: float
    high: float
    mean: float


def spread(times: Sequence[float]) -> Spread:
    """Quartiles and `robust_mean` of times; there must be one.

    >>> spread([1.0, 2.0, 3.0, 4.0, 100.0])
    Spread(low=2.0, median=3.0, high=4.0, mean=4.8)
    """
    low, median, high = quantiles(
        [*times, *times[: len(times) == 1]], method="inclusive"
    )
    return Spread(low, median, high, robust_mean(times))


@dataclass(frozen=True)
class ChunkProfile:
    """Times of one chunk in ms.

    Args:
        times: of the passes that it has in a step.
        layers: for F, B and W: the sum of the layers, each run alone, over the time of
            the chunk.
    """

    chunk: int
    stage: int
    times: Mapping[str, Spread]
    layers: Mapping[str, float]


@dataclass(frozen=True)
class Profile:
    """Times in ms, sizes in bytes; `zbpp.diagnostics.profile` measures it.

    Args:
        layers: costs of each layer, scaled so that those of a chunk and an overhead of
            each pass add up to its own; with parts where they name their communication.
        memory: columns of the layers' memory, by the allocator of an accelerator; None
            on CPUs.
        placement: of the measured pipeline.
        split: layers of its chunks.
        chunks: each one's own times.
        optimizer: O of each stage, with its norm.
        validation: V of each stage.
        links: by pair of stages.
        splits: for each stage whether W has anything to do.
        rounds: steps that were counted, and runs of each layer alone.
        device: their kind.
        speculative: O and V are those of speculative steps.
    """

    layers: LayerCosts
    memory: Mapping[str, tuple[float, ...]] | None
    placement: Placement
    split: tuple[int, ...]
    chunks: tuple[ChunkProfile, ...]
    optimizer: tuple[float, ...]
    validation: tuple[float, ...]
    links: Mapping[tuple[int, int], Link]
    splits: tuple[bool, ...]
    rounds: int
    device: str
    speculative: bool

    def costs(
        self,
        placement: Placement | None = None,
        split: Sequence[int] | None = None,
        *,
        recompute: Collection[int] = (),
    ) -> Costs:
        """Costs to plan with.

        Args:
            placement: None: as measured.
            split: layers of each chunk; None: as measured.
            recompute: layers that are recomputed.

        Raises:
            RequestError: the split does not fit the placement.
        """
        placement = placement or self.placement
        costs = self.layers.on(placement, split or self.split, recompute=recompute)
        if not all(self.splits) and placement == self.placement:
            costs = replace(costs, splits=self.splits)
        return costs

    def with_memory(self, estimated: LayerCosts) -> "Profile":
        """Add the memory of the layers: as measured, the rest of it as estimated.

        Args:
            estimated: by `zbpp.memory.layer_memory`.
        """
        measured: Mapping[str, Any] = self.memory or {}
        layers = self.layers.with_memory_of(replace(estimated, **measured))
        return replace(self, layers=layers)

    @property
    def table(self) -> str:
        """All figures, for people."""
        kinds = [k for k in _KINDS if any(k in chunk.times for chunk in self.chunks)]
        rows = [["chunk", "stage", "layers", *kinds, "layers / chunk"]]
        first = 0
        for chunk, count in zip(self.chunks, self.split, strict=True):
            ends = f"{first}-{first + count - 1}"
            first += count
            times = [_text(chunk.times.get(kind)) for kind in kinds]
            ratios = " ".join(f"{chunk.layers[k]:.2f}" for k in "FBW")
            rows.append([str(chunk.chunk), str(chunk.stage), ends, *times, ratios])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join([*lines, *self._others()])

    def _others(self) -> list[str]:
        how = "speculative" if self.speculative else "behind a barrier"
        layers = self.layers
        lines = [
            f"O ({how}), with norms: {_list(self.optimizer)} ms by stage",
            f"V: {_list(self.validation)} ms  loss: {layers.loss:.3f} ms  "
            f"sum over the stages: {layers.reduction:.3f} ms",
        ]
        lines += [
            f"link {a}-{b}: delay {link.delay:.3f} ms, "
            + (
                "no slower for 1 MiB"
                if link.bandwidth >= FASTEST
                else f"{link.bandwidth * 1e3 / 2**30:.2f} GiB/s"
            )
            for (a, b), link in sorted(self.links.items())
        ]
        lines += self._communication()
        lines.append(
            f"ms on {self.device}, medians of {self.rounds} steps; in brackets the "
            f"quartiles; of each pass F {layers.pass_f:.3f} B {layers.pass_b:.3f} W "
            f"{layers.pass_w:.3f} are between it and the one before; layers / chunk: "
            "F B W of the layers alone, added up, over the chunk's"
        )
        return lines

    def _communication(self) -> list[str]:
        """A line for each layer that says where it communicates."""
        if self.layers.parts is None:
            return []
        lines = []
        for layer in range(self.layers.n_layers):
            parts = self.layers.parts_of(layer)
            network_times = [
                f"{kind} {on_network:.3f} of {parts.time(kind):.3f} ms"
                for kind in (PassKind.F, PassKind.B)
                if (on_network := parts.on_lane(kind, Lane.NETWORK))
            ]
            if network_times:
                lines.append(
                    f"layer {layer} communicates in {', in '.join(network_times)}"
                )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        data = asdict(replace(self, links={}, chunks=()))
        data["placement"] = list(self.placement.stage_of)
        data["chunks"] = [
            {**asdict(x), "times": {k: t._asdict() for k, t in x.times.items()}}
            for x in self.chunks
        ]
        data["links"] = [
            {"stages": list(pair), **asdict(link)}
            for pair, link in sorted(self.links.items())
        ]
        return {"unit": {"time": "ms", "memory": "bytes"}, **data}


def _text(times: Spread | None) -> str:
    if times is None:
        return "-"
    return f"{times.median:.3f} ({times.low:.3f}-{times.high:.3f})"


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)
