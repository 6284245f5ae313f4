"""Memory of every stage under every mode, before a step has run.

The bytes of a stage are the planner's sums: `zbpp.core.occupancy.peaks` of the layers'
columns, messages and batch included.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from operator import add
from typing import Any, Unpack

from zbpp.core import Costs, LayerCosts, Link, RequestError, Schedule, ranges_of
from zbpp.core.occupancy import peaks
from zbpp.core.replicas import Shard
from zbpp.memory.layers import Layers, Tracing, adamw, trace_layers
from zbpp.models.entry import AnyModel
from zbpp.planning import USUAL_MODES, is_file, plan
from zbpp.planning.make import choose_validation
from zbpp.planning.replicas import Network, check_replicas, on_replicas
from zbpp.planning.request import split_of
from zbpp.runtime.loss import LossFn
from zbpp.runtime.optim.make import MakeOptimizer

_MOST_SAMPLES = 2**20
_AT_ONCE = Network(Link(0.0, math.inf))


@dataclass(frozen=True)
class StageEstimate:
    """Bytes of one stage in a step.

    Args:
        parameters: tied parameters count once on a stage, and on each of several
            stages. Replicas that shard parameters have one part each.
        gradients: of one step; each layer has one for a parameter that it shares. With
            residuals three times as much: those of the step before, too.
        optimizer: its state.
        buffers: and what layers keep from their first forward on.
        rollback: copies that post-validation keeps.
        messages: three of the largest that the stage sends or receives; on CPUs two,
            and all that a step sends.
        other: inputs and targets of all micro-batches, where the stage reads them, and
            the largest gathered part of sharded state.
        activations_peak: largest memory that F and B leave and passes need inside.
        peak: most of all together at any time.
        host: in host memory, where the optimizer steps there; no part of the peak.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    rollback: int
    messages: int
    other: int
    activations_peak: int
    peak: int
    host: int = 0


@dataclass(frozen=True)
class Estimate:
    """Stages of every mode, or the reason why a mode is impossible.

    Args:
        modes: by name.
        refused: reasons by name.
        samples: of a micro-batch.
        device: whose kernels were taken.
    """

    modes: Mapping[str, Sequence[StageEstimate]]
    refused: Mapping[str, str]
    samples: int
    device: str

    def peak(self, mode: str) -> int:
        """Largest memory of a stage of a mode."""
        return max(stage.peak for stage in self.modes[mode])

    def as_json(self) -> dict[str, Any]:
        """The form that other tools read."""
        stages = {
            name: [asdict(s) for s in of_mode] for name, of_mode in self.modes.items()
        }
        return {"unit": "bytes", "modes": stages}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The stages to estimate; `estimate` explains the fields."""

    n_stages: int
    n_microbatches: int
    split: Sequence[int] | None = None
    post_validation: bool | None = None
    costs: Costs | None = None
    data_parallel: int = 1
    shard: Shard = "none"
    residuals: bool = False


def estimate(
    model: AnyModel,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    n_stages: int,
    n_microbatches: int,
    modes: Sequence[str] = USUAL_MODES,
    optimizer: MakeOptimizer | None = adamw,
    split: Sequence[int] | None = None,
    post_validation: bool | None = None,
    costs: Costs | None = None,
    data_parallel: int = 1,
    shard: Shard = "none",
    residuals: bool = False,
    **tracing: Unpack[Tracing],
) -> Estimate:
    """Bytes of every stage under every mode, without allocating a weight.

    The arguments that `zbpp.Pipeline` has too mean the same there; `layer_memory`
    explains the model, and `Tracing` the rest. For the usual models the peaks are
    within 5 % of the allocator's.

    Args:
        model: as for `layer_memory`.
        batch: as for `layer_memory`.
        loss_fn: as for `layer_memory`.
        n_stages: stages.
        n_microbatches: micro-batches in a step.
        modes: modes, or schedule files.
        optimizer: called with fake parameters; None: there is no step.
        split: layers of each chunk.
        post_validation: None: as `zbpp.Pipeline` decides it.
        costs: times to plan for.
        data_parallel: replicas of every stage.
        shard: state that replicas shard: none, optimizer, gradients or
            parameters; each includes those before.
        residuals: replicas sum gradients by `zbpp.TopK`.
        tracing: see `Tracing`.

    Raises:
        RequestError: the model has no layers or branches on its data, or no mode is
            possible.
    """
    check_replicas(data_parallel, shard)
    layers = trace_layers(model, batch, loss_fn, optimizer=optimizer, **tracing)
    request = Request(
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        split=split,
        post_validation=post_validation,
        costs=costs,
        data_parallel=data_parallel,
        shard=shard,
        residuals=residuals,
    )
    return estimate_modes(layers, request, modes)


def estimate_modes(layers: Layers, request: Request, modes: Sequence[str]) -> Estimate:
    """Plan each mode, and estimate its stages.

    An impossible mode, for instance with more chunks than layers, has its reason.
    """
    estimates, refused = {}, {}
    for mode in modes:
        try:
            estimates[mode] = _Stages.of(layers, request, mode).estimates()
        except RequestError as error:
            refused[mode] = str(error).partition("\n")[0]
    if not estimates:
        raise RequestError(f"no mode is possible: {next(iter(refused.values()))}")
    fake = layers.fake
    return Estimate(estimates, refused, fake.samples, str(fake.device))


def costs_of_chunks(
    layers: Layers, request: Request, mode: str, limit: float | None
) -> Costs:
    """Costs of a mode's chunks, with their bytes."""
    chunks = _Stages.of(layers, request, mode).on_chunks().with_limit(limit)
    return (request.costs or Costs()).with_memory_of(chunks)


@dataclass(frozen=True)
class _Stages:
    """The stages of one mode, and the layers of their chunks."""

    layers: Layers
    request: Request
    schedule: Schedule
    costs: LayerCosts
    """Of the layers, as replicas store them."""
    ranges: Sequence[range]

    @classmethod
    def of(cls, layers: Layers, request: Request, mode: str) -> "_Stages":
        """Plan a mode.

        Raises:
            RequestError: the mode is impossible, or the layers do not fit.
        """
        sizes = request.n_stages, request.n_microbatches
        # a file may have changed, and knows its sizes
        plan_once = _plan.__wrapped__ if is_file(mode) else _plan
        schedule = choose_validation(
            plan_once(mode, *sizes, request.costs),
            request.post_validation,
            steps=layers.optimizer is not None,
        )
        n_layers = len(layers.rows)
        ranges = ranges_of(split_of(schedule, request.split or None, n_layers))
        validates = schedule.is_post_validated
        n = request.data_parallel
        costs = on_replicas(
            layers.costs(post_validation=validates), n, _AT_ONCE, request.shard
        )
        if request.residuals:
            more = (2 * sum(row.gradients) for row in layers.rows)
            fixed = tuple(map(add, costs.of("m_fixed"), more))
            costs = replace(costs, m_fixed=fixed)
        tied = tuple((of, fixed, 0.0, size) for of, fixed, _, size in costs.tied)
        stages = cls(layers, request, schedule, costs, ranges)
        at_passes = replace(stages, costs=replace(costs, peak_o=0.0, tied=tied))
        if stages.peaks == at_passes.peaks:
            return stages  # no stage has its peak in a step
        # the step of a stage needs less than the steps of its layers one by one
        peak_o = [0.0] * len(layers.rows)
        for stage in range(schedule.n_stages):
            here = stages.indices(stage)
            step = layers.step(here, post_validation=validates)
            peak_o[here[0]] = step.peak / (1 if request.shard == "none" else n)
        return replace(stages, costs=replace(costs, peak_o=tuple(peak_o), tied=tied))

    def indices(self, stage: int) -> list[int]:
        """Layers of a stage."""
        chunks = self.schedule.placement.chunks_of[stage]
        return [i for chunk in chunks for i in self.ranges[chunk]]

    def on_chunks(self) -> Costs:
        """Costs of the chunks."""
        schedule, split = self.schedule, [*map(len, self.ranges)]
        return self.costs.on(
            schedule.placement, split, n_microbatches=schedule.n_microbatches
        )

    @cached_property
    def peaks(self) -> list[float]:
        """Largest memory of each stage."""
        schedule = self.schedule
        return peaks(schedule.orders, self.on_chunks().on(schedule.placement))

    def estimates(self) -> list[StageEstimate]:
        """Estimate every stage."""
        costs, schedule = self.costs, self.schedule
        placement, m = schedule.placement, schedule.n_microbatches
        chunks = self.on_chunks().on(placement)
        messages = costs.messages_on(placement, self.ranges, m)
        whole, batch = costs.whole_on(placement, self.ranges), costs.of("batch")
        return [
            self._estimate(
                stage,
                messages=int(messages[stage]),
                other=int(
                    whole[stage] + m * sum(batch[i] for i in self.indices(stage))
                ),
                activations_peak=int(peak - chunks.fixed[stage]),
                peak=int(peak),
            )
            for stage, peak in enumerate(self.peaks)
        ]

    def _estimate(self, stage: int, **sums: int) -> StageEstimate:
        layers, here, request = self.layers, self.indices(stage), self.request
        n = 1 if request.shard == "none" else request.data_parallel
        validates = self.schedule.is_post_validated
        steps = [layers.step([i], post_validation=validates) for i in here]
        copies = 3 if request.residuals else 1
        return StageEstimate(
            parameters=layers.bytes_of(layers.parameters(here)) // n,
            gradients=copies * sum(sum(layers.rows[i].gradients) for i in here) // n,
            optimizer=sum(step.state for step in steps) // n,
            buffers=layers.buffers(here),
            rollback=sum(step.rollback for step in steps) // n,
            host=sum(step.host for step in steps) // n,
            **sums,
        )


@lru_cache(maxsize=64)
def _plan(
    mode: str, n_stages: int, n_microbatches: int, costs: Costs | None
) -> Schedule:
    return plan(
        mode,
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        costs=costs,
        effort="fast",
    )


# ---- The largest micro-batch.


def largest_microbatch(
    layers: Layers, request: Request, limit: float, modes: Sequence[str]
) -> dict[str, int]:
    """The most samples of a micro-batch with which each mode fits a limit; 0: none.

    Every size is traced: not all that a pass takes grows with the samples.

    Args:
        layers: with micro-batches of any size.
        request: the stages.
        limit: bytes of a stage.
        modes: to be searched.
    """
    of_size = cache(layers.of_size)

    @cache
    def peak(mode: str, samples: int) -> float:
        try:
            return estimate_modes(of_size(samples), request, [mode]).peak(mode)
        except (RuntimeError, RequestError):  # a layer does not take this size
            return math.inf

    first = layers.fake.samples
    return {mode: _most(partial(peak, mode), limit, first) for mode in modes}


def _most(need: Callable[[int], float], limit: float, first: int) -> int:
    """The largest number whose need is within a limit; 0: not even 1.

    The need is nearly a straight line, through those of `first` and of twice as many;
    above the line come rounding and temporaries of some sizes.
    """
    needed = need(first)
    slope = (need(2 * first) - needed) / first
    if not 0 < slope < math.inf:
        return first if needed <= limit else 0
    n = min(_MOST_SAMPLES, max(0, first + math.floor((limit - needed) / slope)))
    while n and need(n) > limit:
        n -= 1
    while 0 < n < _MOST_SAMPLES and need(n + 1) <= limit:
        n += 1
    return n
