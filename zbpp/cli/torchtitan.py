"""The flags of torchtitan that go with a schedule's CSV."""

from pathlib import Path

from zbpp.core import Schedule
from zbpp.schedules import torch_schedule_name, without_collectives

__all__ = ["torchtitan_lines"]

_DEFAULT_CHUNKS = {"1F1B": 1, "ZBVZeroBubble": 2, "Interleaved1F1B": 2}


def torchtitan_lines(schedule: Schedule, csv: Path) -> list[str]:
    """Say how torchtitan runs a CSV: its flags, then what they leave open.

    torchtitan takes the placement of the chunks from the schedule's name, and the
    number of micro-batches from the batch sizes; a CSV that disagrees hangs.
    """
    if schedule != without_collectives(schedule):
        return [
            f"torchtitan: {csv} has collectives of its own, as "
            '_load_csv(path, format="compute_comms") of torch reads them; torchtitan '
            "adds its own: plan without --data_parallel for it"
        ]
    name = torch_schedule_name(schedule.placement)
    if name is None:
        chunks = " ".join(map(str, schedule.placement.stage_of))
        return [
            f"torchtitan: no schedule name places the chunks as {chunks}; load the CSV "
            "with torch's _PipelineScheduleRuntime, each rank with its row's chunks"
        ]
    flags = {
        "schedule": name,
        "schedule_csv": csv,
        "degree": schedule.n_stages,
        "microbatch_size": 1,
    }
    lines = [
        "torchtitan: "
        + " ".join(
            f"--parallelism.pipeline_parallel_{flag} {value}"
            for flag, value in flags.items()
        )
        + f" --training.local_batch_size {schedule.n_microbatches}"
    ]
    each = schedule.placement.n_chunks // schedule.n_stages
    if each != _DEFAULT_CHUNKS[name]:
        lines.append(
            f"torchtitan: choose --parallelism.pipeline_parallel_layers_per_stage so "
            f"that there are {each} chunks a rank, {schedule.placement.n_chunks} in all"
        )
    return lines
