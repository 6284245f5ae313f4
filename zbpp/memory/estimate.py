"""Memory of every stage under every mode, before a step has run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from zbpp.core import Costs, PassKind, RequestError, Schedule
from zbpp.memory.model import ModelMemory
from zbpp.memory.passes import ChunkPasses
from zbpp.memory.resident import (
    ResidentMemory,
    Steps,
    resident_memory,
)
from zbpp.memory.walk import PeakUsage, walk_stage
from zbpp.planning import is_file, plan
from zbpp.planning.pipelines import choose_validation
from zbpp.planning.replicas import replicated
from zbpp.runtime.partition import partition_layers
from zbpp.schedules import lower

__all__ = [
    "Estimate",
    "StageEstimate",
    "Steps",
    "estimate_modes",
    "estimate_schedule",
    "plan_mode",
    "stage_costs",
]


@dataclass(frozen=True)
class StageEstimate:
    """Bytes of one stage in a step.

    Args:
        parameters: one that layers of the stage share counts once; stages that share
            one hold it each. Replicas that hold them in parts keep one.
        gradients: of one step; between two steps post-validation holds them as well.
            What replicas with parts keep is one, from REDUCE_WAIT on.
        optimizer: its state.
        buffers: and what layers keep from their first forward on.
        rollback: copies that post-validation keeps.
        batch: inputs and targets of all micro-batches, where the stage reads them.
        messages_peak: most that is on its way: received and not read, sent and not
            gone.
        activations_peak: most of what F and B leave, and of what passes need inside.
        peak: most of all together at any time; the parts have theirs at other times.
        gathered_peak: most that is gathered at once of parameters in parts.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    rollback: int
    batch: int
    messages_peak: int
    activations_peak: int
    peak: int
    gathered_peak: int = 0


@dataclass(frozen=True)
class Estimate:
    """Stages of every mode, or the reason why a mode cannot be had.

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
        """Most that a stage of a mode holds."""
        return max(stage.peak for stage in self.modes[mode])

    def as_json(self) -> dict[str, Any]:
        """The form that other tools read."""
        stages = {
            name: [asdict(s) for s in of_mode] for name, of_mode in self.modes.items()
        }
        return {"unit": "bytes", "modes": stages}


def estimate_modes(
    memory: ModelMemory,
    steps: Steps,
    modes: Sequence[str],
    *,
    n_stages: int,
    n_microbatches: int,
    costs: Costs | None = None,
    effort: str = "fast",
) -> Estimate:
    """Plan each mode, and estimate its stages.

    A mode that cannot be had, as it has more chunks than there are layers, gives its
    reason.
    """
    estimates, refused = {}, {}
    for mode in modes:
        try:
            schedule = plan_mode(mode, n_stages, n_microbatches, costs, effort)
            estimates[mode] = estimate_schedule(memory, steps, schedule)
        except RequestError as error:
            refused[mode] = str(error).partition("\n")[0]
    if not estimates:
        raise RequestError(f"no mode can be had: {next(iter(refused.values()))}")
    device = str(memory.options.device)
    return Estimate(estimates, refused, memory.fake.samples, device)


def plan_mode(
    mode: str,
    n_stages: int,
    n_microbatches: int,
    costs: Costs | None = None,
    effort: str = "fast",
) -> Schedule:
    """Plan a mode once, or read a file, which may have changed and knows its sizes."""
    plan_once = _plan.__wrapped__ if is_file(mode) else _plan
    return plan_once(mode, n_stages, n_microbatches, costs, effort)


@lru_cache(maxsize=64)
def _plan(
    mode: str, n_stages: int, n_microbatches: int, costs: Costs | None, effort: str
) -> Schedule:
    return plan(
        mode,
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        costs=costs,
        effort=effort,
    )


def estimate_schedule(
    memory: ModelMemory, steps: Steps, schedule: Schedule
) -> list[StageEstimate]:
    """Estimate the stages of one schedule.

    Raises:
        RequestError: the layers do not fit the schedule.
    """
    stages, schedule = _stages(memory, steps, schedule)
    n_chunks = schedule.placement.n_chunks
    return [
        _estimate_of(stage, walk_stage(program, stage.chunks, stage.resident, n_chunks))
        for stage, program in zip(stages, lower(schedule), strict=True)
    ]


def stage_costs(
    memory: ModelMemory, steps: Steps, schedule: Schedule, limit: float | None = None
) -> Costs:
    """Memory of a schedule's chunks for planners, in bytes.

    Planners know no messages, and no gradients that come and go: ``m_fixed`` holds the
    most of these, two messages that are announced and one that leaves. The values of a
    stage are dealt to its chunks alike.

    Raises:
        RequestError: as `estimate_schedule`.
    """
    stages, schedule = _stages(memory, steps, schedule)
    n_chunks = schedule.placement.n_chunks
    chunks: dict[int, ChunkPasses] = {}
    fixed, peak_o = [0.0] * n_chunks, [0.0] * n_chunks
    for stage in stages:
        chunks |= stage.chunks
        resident = stage.resident
        made = sum(chunk.gradients for chunk in stage.chunks.values())
        made += sum(resident.gathered.values())
        made += max(resident.in_pass.values(), default=0)
        largest = max(
            n for c in stage.chunks.values() for n in vars(c.messages).values()
        )
        for index in stage.chunks:
            fixed[index] = (resident.total + made + 3 * largest) / len(stage.chunks)
            peak_o[index] = max(resident.step, resident.tied) / len(stage.chunks)
    recomputed = memory.recomputed().layers
    ordered = [chunks[index] for index in range(n_chunks)]
    peaks = {
        kind: tuple(float(chunk.peak(kind)) for chunk in ordered) for kind in PassKind
    }
    least_b = (chunk.m_w - chunk.m_b for chunk in ordered)
    return Costs(
        m_b=tuple(float(chunk.m_b) for chunk in ordered),
        m_w=tuple(float(chunk.m_w) for chunk in ordered),
        memory_limit=limit,
        m_fixed=tuple(fixed),
        peak_f=peaks[PassKind.F],
        peak_b=tuple(map(max, peaks[PassKind.B], map(float, least_b))),
        peak_w=peaks[PassKind.W],
        peak_bw=peaks[PassKind.BW],
        peak_o=tuple(peak_o),
        m_r=tuple(
            float(sum(recomputed[i].m_b for i in layers))
            for layers in _ranges(memory, steps, schedule)
        ),
    )


class _Stage(NamedTuple):
    chunks: dict[int, ChunkPasses]
    resident: ResidentMemory


def _stages(
    memory: ModelMemory, steps: Steps, schedule: Schedule
) -> tuple[list[_Stage], Schedule]:
    """Chunks of every stage, what it holds besides, and the schedule with V's."""
    schedule = choose_validation(
        schedule, steps.post_validation, steps=steps.optimizer is not None
    )
    schedule = replicated(
        schedule, data_parallel=steps.data_parallel, shard=steps.shard
    )
    ranges = _ranges(memory, steps, schedule)
    stages = []
    for indices in schedule.placement.chunks_of:
        chunks = {index: memory.chunk(ranges[index]) for index in indices}
        kept = sum(max(0, chunk.made_in_f) for chunk in chunks.values())
        layers = {index: ranges[index] for index in indices}
        resident = resident_memory(memory, steps, schedule, layers, kept)
        stages.append(_Stage(chunks, resident))
    return stages, schedule


def _ranges(memory: ModelMemory, steps: Steps, schedule: Schedule) -> tuple[range, ...]:
    """Layers of each chunk."""
    n_chunks = schedule.placement.n_chunks
    split = steps.split(n_chunks) if callable(steps.split) else steps.split
    return partition_layers(memory.n_layers, n_chunks, split or schedule.split)


def _estimate_of(stage: _Stage, most: PeakUsage) -> StageEstimate:
    resident = stage.resident
    return StageEstimate(
        parameters=resident.parameters,
        gradients=sum(chunk.gradients for chunk in stage.chunks.values())
        if resident.summed is None
        else sum(resident.summed.values()),
        optimizer=resident.optimizer,
        buffers=resident.buffers,
        rollback=resident.rollback,
        batch=resident.batch,
        messages_peak=most.messages,
        activations_peak=most.activations,
        peak=most.total,
        gathered_peak=max(most.gathered, *resident.in_pass.values(), 0),
    )
