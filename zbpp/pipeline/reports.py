"""Views of a pipeline: its layers and optimizers, and reports on its last step."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zbpp.core import (
    Costs,
    MemoryModel,
    PassKind,
    RequestError,
    Schedule,
    Timeline,
)
from zbpp.core.measured import not_told_apart
from zbpp.core.sharding import Shard
from zbpp.planning import Plan
from zbpp.profiling.join import Profiled
from zbpp.profiling.measure import measure
from zbpp.profiling.memory import peak_held
from zbpp.profiling.prediction import Prediction, predict
from zbpp.profiling.profile import Profile
from zbpp.profiling.window import Wires, measure_wires, window_costs
from zbpp.runtime.driver import collective_calls as calls
from zbpp.runtime.driver.batches import Batches
from zbpp.runtime.driver.build import StageOptions
from zbpp.runtime.driver.lifecycle import Lifecycle
from zbpp.runtime.executor import Executor
from zbpp.runtime.graphed.stage import GraphedStage
from zbpp.runtime.microbatches import Batch
from zbpp.runtime.optim.loss_scale import LossScaler
from zbpp.runtime.parallel.mesh import Place
from zbpp.runtime.ties.plan import Tie, TiePlan

__all__ = ["Reports", "summarize_split"]


class Reports:
    """Read by a script, between steps."""

    schedule: Schedule
    chosen: Plan
    """The schedule as it was planned before the first step, and for what."""
    split: tuple[range, ...]
    device: torch.device
    _ties: TiePlan
    _executors: Mapping[int, Executor]
    _lifecycle: Lifecycle
    _batches: Batches
    _n_steps: int
    _options: StageOptions
    place: Place
    _wires: Wires | None = None

    if TYPE_CHECKING:

        def synchronize(self) -> None:
            """Settle the last step; `zbpp.Pipeline` does."""

    @property
    def n_steps(self) -> int:
        """Steps done so far, those before ``first_step`` included."""
        return self._n_steps

    @property
    def ties(self) -> tuple[Tie, ...]:
        """Parameters that several layers share: (layer, name in it) of each."""
        return self._ties.ties

    @property
    def n_microbatches(self) -> int:
        """Micro-batches in a training step."""
        return self.schedule.n_microbatches

    @property
    def needs_inputs(self) -> bool:
        """True if this process holds the first chunk; others ignore the inputs."""
        return self.schedule.placement.stage_of[0] in self._executors

    @property
    def needs_targets(self) -> bool:
        """True if this process holds the last chunk; others ignore the targets."""
        return self.schedule.placement.stage_of[-1] in self._executors

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of this process's stages, for instance for LR schedulers."""
        shares = (executor.optimizer for executor in self._executors.values())
        return [one for share in shares for one in share.optimizers.all]

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The loss scale, as validated; setting its state sets that of one process."""
        self.synchronize()
        return next(iter(self._executors.values())).optimizer.history.scaler

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """This process's layers as ``layers.<global index>``, validated."""
        self.synchronize()
        yield from self._layers()

    def _layers(self) -> Iterator[tuple[str, nn.Module]]:
        for executor in self._executors.values():
            for index, layer in executor.stage.numbered():
                yield f"layers.{index}", layer

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters under their global names, validated."""
        for name, layer in self.named_layers():
            yield from layer.named_parameters(prefix=name)

    def timeline(self) -> Timeline:
        """Jobs of every stage in the last step, in seconds (every rank must call).

        Clocks of several machines are compared in each call; ``clock_error`` of the
        timeline is the largest error of that, 0 on one machine. On GPUs the times are
        those of CUDA events around the jobs, and the call waits for the last one.

        Raises:
            RequestError: there was no step yet.
        """
        return self.timelines(1)[-1]

    def timelines(self, n: int) -> list[Timeline]:
        """The last steps, oldest first, as far as they are kept: 10 or fewer.

        As `timeline`; those before a `switch` are forgotten.
        """
        found = calls.gather_timelines(self._executors, self.schedule, n)
        if not found:
            raise RequestError("nothing is measured yet; call pipeline.step() first")
        return found

    def split_report(self) -> dict[str, str]:
        """Name the origin of each gradient of this process, by parameter.

        ``"W"``, or ``"B: "`` and the reason why it cannot wait; of the first step.
        """
        return calls.report_split(self._executors)

    def split_summary(self) -> str:
        """One line about `split_report` on all processes (every rank must call)."""
        where: dict[str, str] = {}
        sizes: dict[str, int] = {}
        own = self.split_report(), calls.leaf_sizes(self._executors)
        for reasons, counts in self.gather(own):
            where |= reasons
            sizes |= counts
        return summarize_split(where, sizes)

    def graph_report(self) -> dict[int, str]:
        """Say of each chunk of this process whether its passes are CUDA graphs.

        ``""``, from the third step on; else why they are not.
        """
        found = {}
        for executor in self._executors.values():
            stage = executor.stage
            for i in stage.chunks:
                found[i] = "cuda_graphs is off"
                if isinstance(stage, GraphedStage):
                    found[i] = stage.why_not(i)
        return found

    def measured_costs(self, n: int = 1, *, joint: bool = False) -> Costs:
        """Costs of the last steps, in ms (every rank must call).

        Robust means of the passes, of O with its norms, and of V; the wait for the sum
        of the norms is in none of them. The first call also measures the links and that
        sum, some ms between two steps; they are kept. The loss is a part of the last F.

        Args:
            n: steps that count; 10 or fewer are kept.
            joint: where B and W run as one pass, let B stand for both.

        Raises:
            RequestError: the schedule has passes that run B and W together.
        """
        if not joint and self.schedule.runs(PassKind.BW):
            raise RequestError(not_told_apart(self.schedule.name))
        timelines = self.timelines(n)
        own = {s: one.times.norm_seconds(n) for s, one in self._executors.items()}
        norms = {s: times for part in self.gather(own) for s, times in part.items()}
        if self._wires is None:
            self._wires = measure_wires(self._executors, self.schedule.placement)
        splits = calls.gather_splits(self._executors)
        return window_costs(
            timelines, norms, splits=splits, wires=self._wires, joint=joint
        )

    def prediction(
        self,
        costs: Costs | None = None,
        memory: MemoryModel | None = None,
        *,
        n: int = 10,
    ) -> Prediction:
        """Simulated beside measured: step time, bubble, memory (every rank must call).

        Args:
            costs: in ms; None: those of the same steps.
            memory: in bytes, see `zbpp.memory`; None: that of the costs, if they are
                in bytes.
            n: last steps that count; what the script does between them is in their
                time.

        Raises:
            RequestError: there was no step yet.
        """
        timelines = self.timelines(n)
        own = {stage: peak_held(self.device) for stage in self._executors}
        side_by_side = len(own) == 1
        if not side_by_side:  # they share the process: no stage's memory is known
            own = dict.fromkeys(own)
        held = {s: one for part in self.gather(own) for s, one in part.items()}
        given = costs is not None
        costs = costs or self.measured_costs(n, joint=True)
        if memory is not None:
            costs = replace(costs.with_memory(memory), memory_unit="bytes")
        return predict(
            self.schedule,
            timelines,
            costs,
            held=[held[stage] for stage in sorted(held)],
            given=given,
            side_by_side=side_by_side,
        )

    def profile(
        self,
        inputs: Batch | None = None,
        targets: Batch | None = None,
        *,
        rounds: int = 10,
        most_s: float = 20.0,
        memory: bool = False,
        shard: Shard = "none",
    ) -> Profile:
        """Measure the costs of every layer on these devices (every rank must call).

        Parameters, buffers, gradients, optimizer state, random generators and the
        number of steps are then as before, to the bit.

        Args:
            inputs, targets: as for `step`; the first micro-batch is used.
            rounds: passes to count, after a warm-up.
            most_s: seconds after which fewer rounds will do, but 5 at least.
            memory: also measure what the passes leave and need, on CPUs by a run of
                torch's profiler (none other may run); on a GPU this resets
                `torch.accelerator.max_memory_allocated`.
            shard: what replicas shall share: gathers and sums are measured for it,
                with the layers whole.

        Raises:
            RequestError: the batch does not fit, or layers are sharded.
            PeerError: another stage died, did not answer, or does not profile.
        """
        if any(one.collectives.has_units for one in self._executors.values()):
            raise RequestError(
                "layers that are sharded cannot be profiled, as they cannot be copied; "
                "profile the bare ones, in a pipeline with shard='none': their passes "
                "are the same, and profile(shard=...) measures the collectives"
            )
        self.synchronize()
        inputs, targets = self._batches.pair(inputs, targets)
        next(iter(self._executors.values())).transport.doing = "profile"
        split = tuple(len(layers) for layers in self.split)
        parts = Profiled(
            *(self._executors, self.schedule, split, self._options, self._n_steps),
            *(self.place, shard),
        )
        with self._lifecycle.running(), calls.failures_told(self._executors):
            return measure(
                parts, inputs, targets, rounds=rounds, most_s=most_s, memory=memory
            )

    def gather(self, thing: Any) -> list[Any]:
        """Give every process the picklable things of all, by rank."""
        return next(iter(self._executors.values())).transport.gather(thing)


def summarize_split(where: Mapping[str, str], sizes: Mapping[str, int]) -> str:
    """One line: the share of the weights in W, and the reasons of the others.

    Args:
        where: for each parameter ``"W"`` or ``"B: "`` and the reason.
        sizes: elements of each parameter.

    >>> summarize_split({"a": "W", "b": "B: used 2 times"}, {"a": 90, "b": 10})
    'W computes the gradients of 90.0% of 100 parameters; B those of 10 (used 2 times)'
    """
    total = sum(sizes[name] for name in where)
    reasons: Counter[str] = Counter()
    for name, text in where.items():
        if text != "W":
            reasons[text.removeprefix("B: ")] += sizes[name]
    in_w = total - sum(reasons.values())
    line = (
        f"W computes the gradients of {in_w / max(1, total):.1%} of {total:,} "
        "parameters"
    )
    if reasons:
        parts = (f"{n:,} ({reason})" for reason, n in reasons.most_common())
        line += "; B those of " + ", ".join(parts)
    return line
