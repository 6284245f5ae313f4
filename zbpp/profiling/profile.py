"""The result of a profile: costs per layer, per chunk, and how sure they are."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zbpp.core import Costs, Lane, LayerCosts, PassKind, Placement, format_bytes
from zbpp.profiling.links import FASTEST, Link
from zbpp.profiling.stopwatch import Spread

__all__ = ["ChunkProfile", "Profile"]

_KINDS = ("F", "B", "W", "BW")


@dataclass(frozen=True)
class ChunkProfile:
    """Times of one chunk in ms, and its memory in bytes by the allocator's count.

    Args:
        times: of F, B, W and BW (B and W in a row) in a step, what the host needs
            between two passes included.
        layers: for F, B and W: the sum of the layers, each run alone, over the time of
            the chunk alone.
        left: what F, B and W add to the memory; below 0 what they free.
        peak: the most that is held inside them above what was held before.
    """

    chunk: int
    stage: int
    times: Mapping[str, Spread]
    layers: Mapping[str, float]
    left: Mapping[str, float] = field(default_factory=dict)
    peak: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """Times in ms, sizes in bytes; `Pipeline.profile` measures it.

    Args:
        layers: costs of each layer, scaled so that those of a chunk and an overhead of
            each pass add up to its own; with parts where they name their communication.
        placement: of the measured pipeline.
        split: layers of its chunks.
        chunks: each one's own times.
        optimizer: O of each stage, with its norm.
        validation: V of each stage.
        norm: the norm of each stage's gradients, a part of O.
        reduction: the sum over all stages.
        links: by pair of stages.
        splits: for each stage whether W has anything to do.
        rounds: that were counted.
        device: their kind.
        speculative: O and V are those of speculative steps.
    """

    layers: LayerCosts
    placement: Placement
    split: tuple[int, ...]
    chunks: tuple[ChunkProfile, ...]
    optimizer: tuple[Spread, ...]
    validation: tuple[Spread, ...]
    norm: tuple[Spread, ...]
    reduction: Spread
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
        """Take the memory of the layers from an estimate, see `zbpp.memory`."""
        return replace(self, layers=self.layers.with_memory_of(estimated))

    @property
    def table(self) -> str:
        """All figures, for people."""
        names = ("chunk", "stage", "layers", *_KINDS, "layers / chunk", "measured peak")
        rows = [[str(n) for n in names]]
        first = 0
        for chunk, count in zip(self.chunks, self.split, strict=True):
            ends = f"{first}-{first + count - 1}"
            first += count
            times = [_text(chunk.times[kind]) for kind in _KINDS]
            ratios = " ".join(f"{chunk.layers[k]:.2f}" for k in _KINDS[:3])
            peak = format_bytes(max(chunk.peak.values())) if chunk.peak else "-"
            rows.append(
                [str(chunk.chunk), str(chunk.stage), ends, *times, ratios, peak]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join([*lines, *self._others()])

    def _others(self) -> list[str]:
        how = "speculative" if self.speculative else "behind a barrier"
        lines = [
            f"O ({how}): {_list(self.optimizer)} ms by stage, norms in it "
            f"{_list(self.norm)}",
            f"V: {_list(self.validation)} ms  loss: {self.layers.loss:.3f} ms  "
            f"sum over the stages: {_text(self.reduction)} ms",
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
            f"ms on {self.device}, medians of {self.rounds} rounds; in brackets the "
            f"quartiles; of each pass F {self.layers.pass_f:.3f} B "
            f"{self.layers.pass_b:.3f} W {self.layers.pass_w:.3f} are not its layers'; "
            "layers / chunk: F B W of the layers alone, added up, over the chunk's"
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
        data = asdict(replace(self, links={}))
        data["placement"] = list(self.placement.stage_of)
        data["links"] = [
            {"stages": list(pair), **asdict(link)}
            for pair, link in sorted(self.links.items())
        ]
        return {"unit": {"time": "ms", "memory": "bytes"}, **data}


def _text(spread: Spread) -> str:
    return f"{spread.median:.3f} ({spread.low:.3f}-{spread.high:.3f})"


def _list(values: Sequence[Spread]) -> str:
    return ", ".join(f"{spread.median:.3f}" for spread in values)
