"""Programs of a pipeline's stages: with the collectives of replicas, and in parts."""

from dataclasses import replace

from zbpp.core import (
    AddTied,
    Collective,
    CollectiveKind,
    Costs,
    Instruction,
    Program,
    Receive,
    Reduce,
    Schedule,
    Send,
    Step,
    TiedGradient,
)
from zbpp.core.sharding import reduces_every
from zbpp.runtime.comm.place import Place
from zbpp.runtime.driver.build import Settings
from zbpp.runtime.driver.stages import LocalStages
from zbpp.schedules import add_collectives, lower

__all__ = ["parts_of_step", "with_collectives"]

Programs = tuple[Program, ...]


def with_collectives(
    schedule: Schedule,
    stages: LocalStages,
    place: Place,
    settings: Settings,
    *,
    costs: Costs | None = None,
) -> tuple[Schedule, Programs]:
    """Add the jobs that the replicas' layers need; all processes must call.

    A schedule that has such jobs keeps them where they are. Without replicas there is
    nothing for them to do, but where `fully_shard` has wrapped layers over a mesh of
    one process, whose gradients its reductions write. Without ``overlap`` passes run
    whole, in the order of their starts.
    """
    transport, adds_up = stages.transport, False
    overlaps, each = settings.execution.overlap, reduces_every(settings.replicas.shard)
    if not overlaps:
        schedule = replace(schedule, parts=None)
    has_sums = bool(place.sum_dims()) or any(
        transport.gather(stages.first.collectives.has_units)
    )
    if has_sums:
        shards = any(transport.gather(stages.first.collectives.keeps))
        kinds = {job.kind for job in schedule.orders[0] if isinstance(job, Collective)}
        if schedule.parts is not None and not shards and not each:
            adds_up = True
        elif not kinds or (CollectiveKind.UNSHARD in kinds) != shards:
            schedule = add_collectives(
                schedule,
                shards=shards,
                reduces="every" if each else "last",
            )
    programs = lower(
        schedule,
        ties=settings.ties.chunks,
        costs=costs,
        on_device=transport.on_device,
        overlaps=overlaps,
        adds_up=adds_up,
    )
    return schedule, programs


def parts_of_step(programs: Programs) -> tuple[Programs, Programs]:
    """Cut the programs of a step into its passes, and what comes behind them all.

    Both ends of each channel are cut alike: gradients of tied parameters come last.
    """

    def is_end(instruction: Instruction) -> bool:
        match instruction:
            case Send(value) | Receive(value):
                return isinstance(value, TiedGradient)
        return isinstance(instruction, AddTied | Reduce | Step)

    passes = tuple(tuple(x for x in each if not is_end(x)) for each in programs)
    ends = tuple(tuple(x for x in each if is_end(x)) for each in programs)
    return passes, ends
