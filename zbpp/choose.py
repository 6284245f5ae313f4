"""Which schedule a pipeline runs, and on how many stages."""

from pathlib import Path

from zbpp.core import Costs, MemoryModel, RequestError, Schedule
from zbpp.modes import is_file, plan

__all__ = ["choose_schedule"]


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
    if n_ranks > 1:
        if n_stages not in (None, n_ranks):
            raise _not_one_process_a_stage(n_stages, n_ranks)
        n_stages = n_ranks
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


def _not_one_process_a_stage(n_stages: int | None, n_ranks: int) -> RequestError:
    return RequestError(
        f"{n_ranks} processes cannot run {n_stages} stages; start one process a stage"
    )
