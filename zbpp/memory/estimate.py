"""Memory of every stage under every mode, before a step has run."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from zbpp.core import Costs, MemoryModel, RequestError, Schedule
from zbpp.memory.fixed import Fixed, Steps, fixed_of, layer_parts
from zbpp.memory.model import ModelMemory
from zbpp.memory.passes import ChunkPasses
from zbpp.memory.walk import Held, StageWalk
from zbpp.planning import plan
from zbpp.planning.pipelines import choose_validation
from zbpp.planning.replicas import replicated
from zbpp.runtime.compiled.layers import Compiling
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
        compiled: what is compiled, but for the layers ``as_they_are``.
        as_they_are: layers that the compiler makes no single graph of.
    """

    modes: Mapping[str, Sequence[StageEstimate]]
    refused: Mapping[str, str]
    samples: int
    device: str
    compiled: Compiling = False
    as_they_are: Sequence[int] = ()

    def peak(self, mode: str) -> int:
        """Most that a stage of a mode holds."""
        return max(stage.peak for stage in self.modes[mode])

    def as_json(self) -> dict[str, Any]:
        """The form that other tools read."""
        stages = {name: [asdict(s) for s in own] for name, own in self.modes.items()}
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
    found, refused = {}, {}
    for mode in modes:
        try:
            schedule = plan_mode(mode, n_stages, n_microbatches, costs, effort)
            found[mode] = estimate_schedule(memory, steps, schedule)
        except RequestError as error:
            refused[mode] = str(error).partition("\n")[0]
    if not found:
        raise RequestError(f"no mode can be had: {next(iter(refused.values()))}")
    device = str(memory.options.device)
    about = memory.fake.samples, device, memory.options.compile, memory.uncompiled
    return Estimate(found, refused, *about)


@lru_cache(maxsize=64)
def plan_mode(
    mode: str,
    n_stages: int,
    n_microbatches: int,
    costs: Costs | None = None,
    effort: str = "fast",
) -> Schedule:
    """Plan a mode, or read a file, which knows its own sizes."""
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
    schedule, ranges = _prepared(memory, steps, schedule)
    n_chunks = schedule.placement.n_chunks
    found = []
    for stage, program in enumerate(lower(schedule)):
        chunks, fixed = _on_stage(memory, steps, schedule, ranges, stage)
        most = StageWalk(chunks, fixed, n_chunks).run(program)
        found.append(_stage(fixed, most, chunks.values()))
    return found


def stage_costs(
    memory: ModelMemory, steps: Steps, schedule: Schedule, limit: float | None = None
) -> MemoryModel:
    """Memory of a schedule's chunks for planners, in bytes.

    ``m_fixed`` holds what a stage has besides: two messages that are announced and one
    that leaves. The values of a stage are dealt to its chunks alike.

    Raises:
        RequestError: as `estimate_schedule`.
    """
    schedule, ranges = _prepared(memory, steps, schedule)
    placement = schedule.placement
    of_chunks: dict[int, ChunkPasses] = {}
    fixed, peak_o = [0.0] * placement.n_chunks, [0.0] * placement.n_chunks
    for stage, own in enumerate(placement.chunks_of):
        passes, held = _on_stage(memory, steps, schedule, ranges, stage)
        of_chunks |= passes
        made = sum(c.made_in_b + c.made_in_w for c in passes.values())
        made += sum((held.in_turn or {}).values())
        made += sum(held.gathered.values()) + max(held.in_pass.values(), default=0)
        largest = max(n for c in passes.values() for n in vars(c.messages).values())
        n_fixed = held.total + made + 3 * largest
        for chunk in own:
            fixed[chunk] = n_fixed / len(own)
            peak_o[chunk] = max(held.step, held.norm) / len(own)
    chunks = [of_chunks[chunk] for chunk in range(placement.n_chunks)]
    again = memory.recomputed()
    m_r = [sum(again.layers[i].m_b for i in own) for own in ranges]
    return MemoryModel(
        m_b=tuple(float(c.m_b) for c in chunks),
        m_w=tuple(float(c.m_w) for c in chunks),
        limit=limit,
        m_fixed=tuple(fixed),
        peak_f=tuple(float(c.peak_f) for c in chunks),
        peak_b=tuple(float(max(c.peak_b, c.m_w - c.m_b)) for c in chunks),
        peak_w=tuple(float(c.peak_w) for c in chunks),
        peak_bw=tuple(float(c.peak_bw) for c in chunks),
        peak_o=tuple(peak_o),
        m_r=tuple(map(float, m_r)),
        memory_unit="bytes",
    )


def _prepared(
    memory: ModelMemory, steps: Steps, schedule: Schedule
) -> tuple[Schedule, tuple[range, ...]]:
    """The schedule with its V's and collectives, and the layers of its chunks."""
    schedule = choose_validation(
        schedule, steps.post_validation, steps=steps.optimizer is not None
    )
    schedule = replicated(
        schedule, data_parallel=steps.data_parallel, shard=steps.shard
    )
    n_chunks = schedule.placement.n_chunks
    asked = steps.split(n_chunks) if callable(steps.split) else steps.split
    if asked is None:
        asked = schedule.split
    ranges = partition_layers(memory.n_layers, n_chunks, asked)
    return schedule, ranges


def _on_stage(
    memory: ModelMemory,
    steps: Steps,
    schedule: Schedule,
    ranges: Sequence[range],
    stage: int,
) -> tuple[dict[int, ChunkPasses], Fixed]:
    """A stage's chunks, and what it holds besides."""
    own = schedule.placement.chunks_of[stage]
    layers = {c: ranges[c] for c in own}
    chunks = {c: _chunk(memory, steps, ranges[c]) for c in own}
    made = sum(max(0, chunk.made_in_f) for chunk in chunks.values())
    return chunks, fixed_of(memory, steps, schedule, layers, made)


def _chunk(memory: ModelMemory, steps: Steps, layers: range) -> ChunkPasses:
    passes = memory.chunk(layers)
    if not steps.alternating_buffers:
        return passes
    return passes.summed_in_turn(layer_parts(memory, steps.n_parts, layers))


def _stage(fixed: Fixed, most: Held, chunks: Any) -> StageEstimate:
    return StageEstimate(
        parameters=fixed.parameters,
        gradients=sum(chunk.made_in_b + chunk.made_in_w for chunk in chunks)
        if fixed.summed is None
        else sum(fixed.summed.values()),
        optimizer=fixed.optimizer,
        buffers=fixed.buffers,
        rollback=fixed.rollback,
        batch=fixed.batch,
        messages_peak=most.messages,
        activations_peak=most.activations,
        peak=most.peak,
        gathered_peak=max(most.gathered, *fixed.in_pass.values(), 0),
    )
