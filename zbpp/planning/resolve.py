"""Choose the schedule of a pipeline and its number of stages."""

from collections.abc import Sequence
from pathlib import Path

from zbpp.core import (
    Costs,
    MemoryModel,
    PassKind,
    RequestError,
    Schedule,
    parse_memory,
)
from zbpp.modes import is_file, plan
from zbpp.schedules import post_validated, without_checks

__all__ = [
    "check_first_step",
    "choose_schedule",
    "choose_validation",
    "count_stages",
    "memory_model",
    "recomputed_layers",
]


def choose_schedule(
    schedule: str | Path | Schedule,
    *,
    n_stages: int | None,
    n_ranks: int,
    n_microbatches: int | None,
    costs: Costs,
    memory: MemoryModel,
) -> Schedule:
    """Plan the mode, read the file, or take the schedule as it is.

    Its collectives are left out: they depend on the replicas of the pipeline.

    Args:
        schedule: a mode, a schedule file, or a schedule.
        n_stages: what was asked for; None: as many as the schedule has, or one per
            process.
        n_ranks: processes of the pipeline; one alone may hold any number of stages.
        n_microbatches: what was asked for; None: what the schedule has.
        costs: times to plan for.
        memory: memory to plan for.

    Raises:
        RequestError: these do not fit together.
    """
    n_stages = count_stages(n_stages, n_ranks)
    if not isinstance(schedule, Schedule):
        mode = str(schedule)
        return plan(
            mode,
            n_stages=n_stages if n_stages or is_file(mode) else n_ranks,
            n_microbatches=n_microbatches,
            costs=costs,
            memory=memory,
        )
    if n_stages not in (None, schedule.n_stages):
        if n_ranks > 1:
            raise _not_one_process_a_stage(schedule.n_stages, n_ranks)
        raise RequestError(
            f"the schedule has {schedule.n_stages} stages; {n_stages} were asked for"
        )
    if n_microbatches not in (None, schedule.n_microbatches):
        raise RequestError(
            f"the schedule has {schedule.n_microbatches} micro-batches; "
            f"{n_microbatches} were asked for"
        )
    return schedule


def count_stages(n_stages: int | None, n_ranks: int) -> int | None:
    """Number of stages: one a process, if there are several; else what is asked for.

    Raises:
        RequestError: another number is asked for than there are processes.
    """
    if n_ranks > 1 and n_stages not in (None, n_ranks):
        raise _not_one_process_a_stage(n_stages, n_ranks)
    return n_ranks if n_ranks > 1 else n_stages


def choose_validation(
    schedule: Schedule, wanted: bool | None, *, steps: bool = True
) -> Schedule:
    """Give a schedule its V's, or take them out.

    Args:
        schedule: with or without V's.
        wanted: None: yes for schedules that split the backward or have V's already,
            if there are stages to wait for. Others have bubbles enough for a barrier.
        steps: there is an optimizer.

    Raises:
        RequestError: steps shall be validated, but the caller takes them.
    """
    if wanted and not steps:
        raise RequestError(
            "post_validation is on, but optimizer is None: there is no step to "
            "validate; give an optimizer, or leave post_validation out"
        )
    if wanted is None:
        asked = schedule.runs(PassKind.W) or schedule.is_post_validated
        wanted = steps and schedule.n_stages > 1 and asked
    return post_validated(schedule) if wanted else without_checks(schedule)


def recomputed_layers(schedule: Schedule, ranges: Sequence[range]) -> frozenset[int]:
    """Global indices of the layers that a schedule recomputes.

    Args:
        schedule: says which of each chunk's layers.
        ranges: layers of each chunk.

    Raises:
        RequestError: a chunk has no such layer.
    """
    found: set[int] = set()
    for chunk, layers in enumerate(ranges):
        for layer in schedule.recomputes(chunk, len(layers)):
            if not layer < len(layers):
                raise RequestError(
                    f"layer {layer} of chunk {chunk} shall be recomputed, but the "
                    f"chunk has {len(layers)} layers; plan for this split, or give the "
                    f"schedule's: {list(schedule.split or ()) or 'it has none'}"
                )
            found.add(layers[layer])
    return frozenset(found)


def memory_model(memory: MemoryModel | str | float | None) -> MemoryModel | None:
    """Read a limit, as a number or a text such as ``"16GiB"``.

    Raises:
        RequestError: the text is no amount of memory.
    """
    if isinstance(memory, MemoryModel) or memory is None:
        return memory
    limit = parse_memory(memory) if isinstance(memory, str) else float(memory)
    return MemoryModel(limit=limit)


def check_first_step(first_step: int) -> int:
    """Return a step's number if it can be one.

    Raises:
        RequestError: it is not a whole number from 0 on.
    """
    if not isinstance(first_step, int) or first_step < 0:
        raise RequestError(
            f"first_step is {first_step!r}; give the number of steps done before, from "
            "0 on (pipeline.n_steps when the state was saved)"
        )
    return first_step


def _not_one_process_a_stage(n_stages: int | None, n_ranks: int) -> RequestError:
    return RequestError(
        f"{n_ranks} processes cannot run {n_stages} stages; start one process a stage"
    )
