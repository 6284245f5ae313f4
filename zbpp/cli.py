"""The ``zbpp`` command: one dataclass a command, its fields are the flags.

Every flag may be written with hyphens or underscores. Exit codes: 0 done, 2 the
request was wrong or cannot be met, 1 a fault of ours or of the machine.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from zbpp.core import (
    Costs,
    MemoryModel,
    RequestError,
    Schedule,
    WorkerError,
    read_costs,
    schedule_text,
)
from zbpp.doctor import report_lines
from zbpp.modes import MODES, canonical, plan
from zbpp.report import Summary, print_comparison, print_report, summarize
from zbpp.schedules import certify, to_torch_csv
from zbpp.simulator import plot, simulate, write_trace
from zbpp.training.options import Train

__all__ = ["Compare", "Doctor", "Plan", "Plot", "Show", "Trace", "main"]


_Text = str | None
_Count = int | None


def _shown_as(metavar: str) -> object:
    """Name a value in help texts."""
    return tyro.conf.arg(metavar=metavar)


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What most commands are told."""

    costs: Annotated[Path | None, _shown_as("PATH")] = None
    """Costs file (JSON); without it F, B and W take 1 each and messages nothing."""
    memory_limit: Annotated[float | None, _shown_as("FLOAT")] = None
    """Largest activation memory of a stage, in the unit of the costs."""
    effort: Annotated[str, _shown_as("EFFORT")] = "default"
    """How hard to search: fast, default, best (a minute) or best:SECONDS."""

    def models(self) -> tuple[Costs, MemoryModel]:
        """Read the costs, and let the flag overrule the file's memory limit."""
        costs, memory = Costs(), MemoryModel()
        if self.costs is not None:
            costs, memory = read_costs(self.costs)
        if self.memory_limit is not None:
            memory = replace(memory, limit=self.memory_limit)
        return costs, memory


@dataclass(frozen=True, kw_only=True)
class _OneSchedule(_Given):
    """A schedule: from a file, or planned from a mode."""

    schedule: Annotated[_Text, tyro.conf.Positional, _shown_as("PLAN.json")] = None
    """A schedule file (or a mode)."""
    pipeline_schedule_mode: Annotated[_Text, _shown_as("MODE")] = None
    """FThenB, 1F1B, VPP, ZBH1, ZBH2, ZB, ZBV, ZBVPP, VHalf, VMin, auto, or a file."""
    stages: Annotated[_Count, _shown_as("INT")] = None
    """Pipeline stages; a schedule file knows its own."""
    microbatches: Annotated[_Count, _shown_as("INT")] = None
    """Micro-batches in a step; a schedule file knows its own."""

    def load(self) -> tuple[Schedule, Costs, MemoryModel]:
        """Plan or read the schedule."""
        modes = {self.schedule, self.pipeline_schedule_mode} - {None}
        if len(modes) != 1:
            raise RequestError(
                "two schedules are named; give a schedule file or "
                "--pipeline_schedule_mode, not both"
                if modes
                else "no schedule is named; give a schedule file, or "
                "--pipeline_schedule_mode with --stages and --microbatches"
            )
        costs, memory = self.models()
        schedule = _plan(
            *(str(modes.pop()), self.stages, self.microbatches),
            *(costs, memory, self.effort),
        )
        return schedule, costs, memory


@dataclass(frozen=True, kw_only=True)
class Plan(_Given):
    """Plan a schedule and write it to a file."""

    pipeline_schedule_mode: Annotated[str, _shown_as("MODE")]
    """FThenB, 1F1B, VPP, ZBH1, ZBH2, ZB, ZBV, ZBVPP, VHalf, VMin, auto, or a file."""
    stages: Annotated[_Count, _shown_as("INT")] = None
    """Pipeline stages."""
    microbatches: Annotated[_Count, _shown_as("INT")] = None
    """Micro-batches in a step."""
    out: Path
    """Schedule file to write (JSON)."""
    csv: Annotated[Path | None, _shown_as("PATH")] = None
    """Also write the CSV that torch.distributed.pipelining loads."""
    solver: Literal["cpsat"] | None = None
    """Let OR-tools prove the plan optimal, better it, or bound it (small cases)."""
    solver_seconds: Annotated[float, _shown_as("FLOAT")] = 60.0
    """How long the solver may search."""

    def run(self) -> None:
        """Plan, write, and say what it will cost."""
        costs, memory = self.models()
        schedule = _plan(
            *(self.pipeline_schedule_mode, self.stages, self.microbatches),
            *(costs, memory, self.effort),
        )
        proof = ""
        if self.solver is not None:
            found = certify(schedule, costs, memory, seconds=self.solver_seconds)
            schedule, proof = found.schedule, f", {found}"
        _write(self.out, schedule_text(schedule))
        if self.csv is not None:
            _write(self.csv, to_torch_csv(schedule))
        summary = summarize(schedule, costs, memory)
        print(
            f"{self.out}: {summary.mode}, {summary.n_stages} stages, "
            f"{summary.n_microbatches} micro-batches, "
            f"bubble rate {summary.bubble_rate:.2%}, "
            f"peak memory {max(summary.peak_memory):.4g}, "
            f"gap to the lower bound {summary.gap:.2%}{proof}"
        )


@dataclass(frozen=True, kw_only=True)
class Show(_OneSchedule):
    """Show a schedule as text: picture, bubble rate, memory, gap to the lower bound."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object instead."""

    def run(self) -> None:
        """Print the report."""
        schedule, costs, memory = self.load()
        if self.json:
            print(json.dumps(asdict(summarize(schedule, costs, memory))))
        else:
            print_report(schedule, costs, memory)


@dataclass(frozen=True, kw_only=True)
class Plot(_OneSchedule):
    """Draw a schedule's timeline."""

    out: Path
    """Picture to write: .png, .svg, .pdf or .html."""

    def run(self) -> None:
        """Draw, and name the file."""
        schedule, costs, memory = self.load()
        plot(simulate(schedule, costs), self.out, memory=memory)
        print(self.out)


@dataclass(frozen=True, kw_only=True)
class Trace(_OneSchedule):
    """Write a schedule's timeline for Perfetto; one unit of time is a millisecond."""

    out: Path
    """Trace to write (Chrome's JSON format)."""

    def run(self) -> None:
        """Write, and name the file."""
        schedule, costs, memory = self.load()
        write_trace(simulate(schedule, costs), self.out, memory=memory)
        print(self.out)


@dataclass(frozen=True, kw_only=True)
class Compare(_Given):
    """Compare all modes in one table."""

    stages: int
    """Pipeline stages."""
    microbatches: int
    """Micro-batches in a step."""

    def run(self) -> None:
        """Print the table; a mode that cannot be had gives its reason below."""
        costs, memory = self.models()
        rows: list[tuple[str, Summary | str]] = []
        for mode in MODES:
            try:
                schedule = _plan(
                    mode, self.stages, self.microbatches, costs, memory, self.effort
                )
                rows.append((mode, summarize(schedule, costs, memory)))
            except RequestError as error:
                rows.append((mode, str(error).partition("\n")[0]))
        if all(isinstance(row, str) for _, row in rows):
            raise RequestError(f"no mode can be had: {rows[0][1]}")
        title = f"{self.stages} stages, {self.microbatches} micro-batches"
        print_comparison(rows, title=title)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Print versions, devices and backends, and what is missing."""

    def run(self) -> None:
        """Print one fact a line."""
        print("\n".join(report_lines()))


Command = (
    Annotated[Plan, tyro.conf.subcommand("plan")]
    | Annotated[Show, tyro.conf.subcommand("show")]
    | Annotated[Plot, tyro.conf.subcommand("plot")]
    | Annotated[Trace, tyro.conf.subcommand("trace")]
    | Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    Bad flags leave by ``SystemExit(2)``, as argparse does it.
    """
    try:
        command = tyro.cli(
            Command,
            prog="zbpp",
            description="Plan, simulate and run zero-bubble pipeline schedules.",
            args=arguments,
            use_underscores=True,
        )
        command.run()
        sys.stdout.flush()
    except RequestError as error:
        print(f"zbpp: {error}", file=sys.stderr)
        return 2
    except WorkerError as error:
        print(f"zbpp: {error}", file=sys.stderr, flush=True)
        if arguments is None:  # tearing torch down would take most of a second
            sys.stdout.flush()
            os._exit(1)
        return 1
    except KeyboardInterrupt:
        print("zbpp: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(
            "zbpp: training needs torch; install it: pip install 'zbpp[train]'",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _plan(
    mode: str,
    stages: int | None,
    microbatches: int | None,
    costs: Costs,
    memory: MemoryModel,
    effort: str,
) -> Schedule:
    """Plan, in the words of the flags."""
    for flag, value in (("--stages", stages), ("--microbatches", microbatches)):
        if value is not None and value < 1:
            raise RequestError(f"{flag} is {value}; it must be at least 1")
        if value is None and not Path(mode).is_file() and Path(mode).suffix != ".json":
            raise RequestError(f"{flag} is missing; {canonical(mode)} needs it")
    return plan(
        mode,
        n_stages=stages,
        n_microbatches=microbatches,
        costs=costs,
        memory=memory,
        effort=effort,
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}") from None
