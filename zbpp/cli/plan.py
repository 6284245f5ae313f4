"""``zbpp plan``: a schedule in a file, and its figures in words."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from zbpp.cli.flags import PlanFlags
from zbpp.cli.outputs import OUT
from zbpp.cli.report import gain_text, recompute_text
from zbpp.cli.summary import short_memory, summarize
from zbpp.core import Schedule
from zbpp.core.files import write_file
from zbpp.planning import Plan as Planned
from zbpp.planning.answer import plan_text
from zbpp.schedules import to_torch_csv, torch_schedule_name
from zbpp.training.options import Mode, Output

_DEFAULT_CHUNKS = {"1F1B": 1, "ZBVZeroBubble": 2, "Interleaved1F1B": 2}


@dataclass(frozen=True, kw_only=True)
class Plan(PlanFlags):
    """Plan a schedule and write it, with its costs, to a plan file."""

    pipeline_schedule_mode: Mode = field(kw_only=False)
    out: Annotated[Output, OUT]
    """Plan file to write (JSON): the schedule, and its costs."""
    csv: Output | None = None
    """Also write the CSV that torch loads, and print torchtitan's flags for it."""

    def run(self, words: Sequence[str]) -> None:
        """Plan, write, and print the figures."""
        plan = self.plan(self.pipeline_schedule_mode)
        schedule = self.with_checks(plan.schedule)
        write_file(self.out, plan_text(replace(plan, schedule=schedule)))
        if self.csv is not None:
            write_file(self.csv, to_torch_csv(schedule))
        summary = summarize(schedule, plan.costs)
        print(
            f"{self.out}: {summary.mode}, {summary.n_stages} stages, "
            f"{summary.n_microbatches} micro-batches, "
            f"bubble rate {summary.bubble_rate:.2%}, "
            f"peak memory {short_memory(max(summary.peak_memory))}, "
            f"gap to the lower bound {summary.gap:.2%}"
        )
        if plan.is_layered:
            print(*_split_lines(plan), sep="\n")
        if schedule.recomputing:
            print(f"recompute: {recompute_text(schedule)}")
        if self.csv is not None:
            print(*_torchtitan_lines(schedule, self.csv), sep="\n")


def _split_lines(planned: Planned) -> list[str]:
    """Three lines: layers of each chunk; step and idle share next to even chunks'."""
    step, even, ideal = planned.step, planned.even_step, planned.ideal_step or 0.0
    lines = {
        "split": f"{' '.join(map(str, planned.split or ()))} layers",
        "step": f"{step:.6g}",
        "idle": f"{_idle(ideal, step):.1%} of the stages' time, unequal work included",
    }
    if even is None:
        lines["step"] += "; even chunks do not fit the memory"
    elif planned.gain is not None:
        lines["step"] += f"; even chunks: {even:.6g}, so {gain_text(planned.gain)}"
        lines["idle"] += f"; even chunks: {_idle(ideal, even):.1%}"
    return [f"{name:6} {text}" for name, text in lines.items()]


def _idle(ideal: float, step: float) -> float:
    """Share of a step in which a stage does not work, in the mean over the stages."""
    return 1 - ideal / step if step > 0 else 0.0


def _torchtitan_lines(schedule: Schedule, csv: Path) -> list[str]:
    """Explain how torchtitan runs a CSV: its flags, then the remaining choices.

    torchtitan takes the placement of the chunks from the schedule's name, and the
    number of micro-batches from the batch sizes; a CSV that disagrees hangs.
    """
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
