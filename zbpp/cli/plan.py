"""``zbpp plan``: a schedule in a file, and in words what it will cost."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from zbpp.cli.flags import PlanFlags
from zbpp.cli.outputs import check_outputs
from zbpp.cli.report import gain_text, recompute_text
from zbpp.cli.summary import short_memory, summarize
from zbpp.core import Schedule
from zbpp.core.files.json_text import write_file
from zbpp.planning import MODE_WORDS, MODES, canonical, is_file
from zbpp.planning import Plan as Planned
from zbpp.planning.answer import plan_text
from zbpp.schedules import (
    to_torch_csv,
    torch_schedule_name,
    without_collectives,
)
from zbpp.schedules.planner.budget import parse_effort
from zbpp.simulator import simulate, span
from zbpp.training.options import MODE_FLAG, flag

__all__ = ["Plan", "gain_line", "waiting_line"]


_LEAST_S = 15.0
_US_A_JOB = (3.0, 12.0)
"""With one chunk a stage or several; effort fast, the larger plans."""

_DEFAULT_CHUNKS = {"1F1B": 1, "ZBVZeroBubble": 2, "Interleaved1F1B": 2}


@dataclass(frozen=True, kw_only=True)
class Plan(PlanFlags):
    """Plan a schedule and write it, with its costs, to a plan file."""

    pipeline_schedule_mode: str = flag(MODE_WORDS, **MODE_FLAG)
    out: Path = flag("plan file to write (JSON): the schedule, and its costs")
    csv: Path | None = flag(
        "also write the CSV that torch loads, and tell torchtitan's flags for it", None
    )

    def run(self) -> None:
        """Plan, write, and say what it will cost."""
        check_outputs(out=self.out, csv=self.csv)
        self._say_how_long()
        plan = self.plan(self.pipeline_schedule_mode)
        schedule, costs = plan.schedule, plan.costs
        found_span = span(simulate(schedule, costs))  # before there are V's
        schedule = self.with_checks(schedule)
        write_file(self.out, plan_text(replace(plan, schedule=schedule)))
        if self.csv is not None:
            write_file(self.csv, to_torch_csv(schedule))
        summary = summarize(schedule, costs)
        print(
            f"{self.out}: {summary.mode}, {summary.n_stages} stages, "
            f"{summary.n_microbatches} micro-batches, "
            f"bubble rate {summary.bubble_rate:.2%}, "
            f"peak memory {short_memory(max(summary.peak_memory))}, "
            f"gap to the lower bound {summary.gap:.2%}"
        )
        if parse_effort(self.effort)[0] == "best":
            usual = replace(self, effort="default").plan(self.pipeline_schedule_mode)
            print(gain_line(found_span, usual.span, self.effort))
        if plan.is_layered:
            print(*_split_lines(plan), sep="\n")
        if schedule.recomputing:
            print(f"recompute: {recompute_text(schedule)}")
        if self.csv is not None:
            print(*_torchtitan_lines(schedule, self.csv), sep="\n")

    def _say_how_long(self) -> None:
        """Tell on stderr of plans that take long."""
        if self.stages is None or self.microbatches is None:
            return
        if is_file(self.pipeline_schedule_mode):  # nothing is searched
            return
        mode = MODES[canonical(self.pipeline_schedule_mode)]
        each = mode.chunks or self.chunks_per_stage or 2
        n_jobs = 3 * self.stages * self.microbatches * each
        line = waiting_line(n_jobs, each, self.effort)
        if line is not None:
            print(line, file=sys.stderr, flush=True)


def waiting_line(n_jobs: int, chunks_per_stage: int, effort: str) -> str | None:
    """Say how long a plan of some jobs will take about; None if that is not long.

    >>> waiting_line(12, 1, "best:30")
    'planning 12 jobs, 30 s of CPU time beyond effort default'
    """
    kind, seconds = parse_effort(effort)
    each = _US_A_JOB[chunks_per_stage > 1]
    about = n_jobs * each * 1e-6 * (1 if kind == "fast" else 3)
    if kind == "best":
        more = f"{seconds:g} s of CPU time beyond effort default"
        return f"planning {n_jobs:,} jobs, {more}"
    if about < _LEAST_S:
        return None
    hint = "" if kind == "fast" else "; effort fast takes a third of it"
    return f"planning {n_jobs:,} jobs, about {about:.0f} s{hint}"


def gain_line(span: float, before: float, effort: str) -> str:
    """Say what effort best has found beyond effort default.

    >>> gain_line(98.0, 100.0, "best:30")
    'best:30: span 98, 2.00% shorter than with effort default'
    """
    if span < before * (1 - 1e-9):
        return (
            f"{effort}: span {span:.6g}, {1 - span / before:.2%} shorter than with "
            "effort default"
        )
    return f"{effort}: span {span:.6g}, nothing shorter than with effort default"


def _split_lines(planned: Planned) -> list[str]:
    """Three lines: layers of each chunk; step and idle share beside even chunks'."""
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
