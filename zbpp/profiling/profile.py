"""The result of a profile: costs per layer, per chunk, and how sure they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from zbpp.core import Costs, Lane, LayerCosts, PassKind, Placement, ranges_of
from zbpp.profiling.links import FASTEST
from zbpp.profiling.means import spread
from zbpp.profiling.steps import StepTimes


@dataclass(frozen=True)
class Profile:
    """Times in ms, sizes in bytes; `zbpp.diagnostics.profile` measures it.

    Args:
        layers: costs of each layer, scaled so that those of a chunk and an overhead of
            a pass give its time; with parts where they name their communication.
        steps: times of the steps that were taken.
        split: layers of the chunks.
        device: kind of the devices.
    """

    layers: LayerCosts
    steps: StepTimes
    split: tuple[int, ...]
    device: str

    @property
    def placement(self) -> Placement:
        """Chunks and stages of the measured pipeline."""
        return self.steps.last.placement

    def costs(
        self,
        placement: Placement | None = None,
        split: Sequence[int] | None = None,
    ) -> Costs:
        """Costs to plan with.

        Args:
            placement: None: as measured.
            split: layers of each chunk; None: as measured.

        Raises:
            RequestError: the split does not fit the placement.
        """
        placement = placement or self.placement
        costs = self.layers.on(
            placement,
            split or self.split,
            n_microbatches=self.steps.last.n_microbatches,
        )
        splits = self.steps.splits
        if not all(splits) and placement == self.placement:
            costs = replace(costs, splits=splits)
        return costs

    def chunks(self) -> list[dict[str, Any]]:
        """First and last layer of each chunk, and the times of its passes in steps."""
        return [
            {
                "layers": [chunk[0], chunk[-1]],
                "times": {k: spread(self.steps.passes[PassKind(k), c]) for k in "FBW"},
            }
            for c, chunk in enumerate(ranges_of(self.split))
        ]

    @property
    def table(self) -> str:
        """All figures, for people."""
        rows = [["chunk", "stage", "layers", "F", "B", "W"]]
        for number, chunk in enumerate(self.chunks()):
            stage, (first, last) = self.placement.stage_of[number], chunk["layers"]
            times = [
                f"{t.median:.3f} ({t.low:.3f}-{t.high:.3f})"
                for t in chunk["times"].values()
            ]
            rows.append([str(number), str(stage), f"{first}-{last}", *times])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True))
            for row in rows
        ]
        steps, layers = self.steps, self.layers
        how = "speculative" if any(steps.validation) else "behind a barrier"
        lines += [
            f"O ({how}), with norms: {_list(steps.optimizer)} ms by stage",
            f"V: {_list(steps.validation)} ms  loss: {layers.loss:.3f} ms  "
            f"sum over the stages: {layers.reduction:.3f} ms",
        ]
        for (a, b), link in sorted(steps.wires.links.items()):
            speed = f"{link.bandwidth * 1e3 / 2**30:.2f} GiB/s"
            if link.bandwidth >= FASTEST:
                speed = "no slower for 1 MiB"
            lines.append(f"link {a}-{b}: delay {link.alpha:.3f} ms, {speed}")
        lines += self._communication()
        lines.append(
            f"ms on {self.device}, medians in steps; in brackets the quartiles; of "
            f"each pass F {layers.pass_f:.3f} B {layers.pass_b:.3f} W "
            f"{layers.pass_w:.3f} are between it and the one before"
        )
        return "\n".join(lines)

    def _communication(self) -> list[str]:
        """A line for each layer with the points where it communicates."""
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


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)
