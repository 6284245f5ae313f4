"""The ``zbpp`` command: one dataclass a command, its fields are the flags.

Every flag may be written with hyphens or underscores. Exit codes: 0 done, 2 the
request was wrong or cannot be met, 1 a fault of ours or of the machine.
"""

import errno
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from zbpp.cli.bench import Bench
from zbpp.cli.doctor import report_lines
from zbpp.cli.estimate import EstimateCommand
from zbpp.cli.flags import PlanFlags, ScheduleFlags
from zbpp.cli.layers_report import split_lines
from zbpp.cli.outputs import check_outputs, check_picture
from zbpp.cli.parser import application, parse
from zbpp.cli.pictures.compare import Compare
from zbpp.cli.pictures.drawings import draw_file
from zbpp.cli.pictures.meshes import Mesh
from zbpp.cli.playground.command import Playground
from zbpp.cli.profile import ProfileCommand
from zbpp.cli.report import print_report, recompute_text
from zbpp.cli.split_report import print_split
from zbpp.cli.summary import short_memory, steady, summarize
from zbpp.cli.torchtitan import torchtitan_lines
from zbpp.cli.train import TrainCommand
from zbpp.cli.waiting import gain_line, waiting_line
from zbpp.core import (
    RequestError,
    WorkerError,
    schedule_text,
)
from zbpp.core.files.json_text import write_file
from zbpp.planning import MODE_WORDS, MODES, canonical, is_file
from zbpp.schedules import certify, to_torch_csv
from zbpp.schedules.planner.budget import parse_effort
from zbpp.simulator import simulate, span
from zbpp.training.options import MODE_FLAG, flag

__all__ = ["Bench", "Compare", "Doctor", "Mesh", "Plan", "Show", "main"]


@dataclass(frozen=True, kw_only=True)
class Plan(PlanFlags):
    """Plan a schedule and write it to a file."""

    pipeline_schedule_mode: str = flag(MODE_WORDS, **MODE_FLAG)
    out: Path = flag("schedule file to write (JSON)")
    csv: Path | None = flag(
        "also write the CSV that torch loads, and tell torchtitan's flags for it", None
    )
    solver: Literal["cpsat"] | None = flag(
        "let OR-tools prove the plan optimal, better it, or bound it (small cases)",
        None,
    )
    solver_seconds: float = flag("time limit of the solver", 60.0)

    def run(self) -> None:
        """Plan, write, and say what it will cost."""
        check_outputs(out=self.out, csv=self.csv)
        self._say_how_long()
        plan = self.plan(self.pipeline_schedule_mode)
        schedule, costs = plan.schedule, plan.costs
        proof = ""
        if self.solver is not None:
            found = certify(schedule, costs, seconds=self.solver_seconds)
            proved = found.schedule
            schedule = replace(
                proved, split=schedule.split, recompute=schedule.recompute
            )
            proof = f", {found}"
        found_span = span(simulate(schedule, costs))  # before there are V's
        schedule = self.with_checks(schedule)
        write_file(self.out, schedule_text(schedule))
        if self.csv is not None:
            write_file(self.csv, to_torch_csv(schedule))
        summary = summarize(schedule, costs)
        print(
            f"{self.out}: {summary.mode}, {summary.n_stages} stages, "
            f"{summary.n_microbatches} micro-batches, "
            f"bubble rate {summary.bubble_rate:.2%}, "
            f"peak memory {short_memory(max(summary.peak_memory), costs.memory_unit)}, "
            f"gap to the lower bound {summary.gap:.2%}{proof}"
        )
        if parse_effort(self.effort)[0] == "best":
            print(self._gain(found_span))
        if plan.is_layered:
            print(*split_lines(plan), sep="\n")
        if schedule.recomputing:
            print(f"recompute: {recompute_text(schedule)}")
        if self.csv is not None:
            print(*torchtitan_lines(schedule, self.csv), sep="\n")

    def _gain(self, found_span: float) -> str:
        """Compare with the plan of effort default."""
        usual = replace(self, effort="default").plan(self.pipeline_schedule_mode)
        return gain_line(found_span, usual.span, self.effort)

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


@dataclass(frozen=True, kw_only=True)
class Show(ScheduleFlags):
    """Show a schedule as text: picture, bubble rate, memory, gap to the lower bound; or
    schedules as a picture, a page or a trace: -o x.svg, x.html, x.json.
    """

    out: Path | None = flag(
        "write .png, .svg, .pdf, a page (.html), or a trace for Perfetto (.json), in "
        "place of the text",
        None,
    )
    json: bool = flag("print one JSON object instead", False, pair=False)
    as_trace: bool = flag("whatever --out is named", False, pair=False, hidden=True)

    def run(self) -> None:
        """Print the report, or write the file and name it."""
        if self.out is not None:
            self._draw(self.out)
            return
        loaded = self.load()
        if len(loaded) > 1:
            raise RequestError(
                "several schedules are named; with --out they are drawn on one time "
                "axis, and zbpp compare has figures of them"
            )
        ((schedule, costs),) = loaded
        if self.json:
            summary, among = summarize(schedule, costs), steady(schedule, costs)
            print(json.dumps(asdict(summary) | asdict(among)))
        else:
            drawn = self.timelines(schedule, costs) if self.iterations != 1 else ()
            print_report(schedule, costs, drawn)

    def _draw(self, out: Path) -> None:
        as_trace = self.as_trace or out.suffix.lower() == ".json"
        check_outputs(out=out)
        if not as_trace:
            check_picture(out)
        draw_file(self, self.load(), out, as_trace=as_trace)
        print(out)


@dataclass(frozen=True, kw_only=True)
class Plot(Show):
    """Draw schedules: zbpp show -o x.svg."""

    out: Path = flag("picture (.png, .svg, .pdf), or page (.html)")


@dataclass(frozen=True, kw_only=True)
class Trace(Show):
    """Write a trace of schedules: zbpp show -o x.json."""

    out: Path = flag("trace (Chrome's JSON format)")
    as_trace: bool = flag("", True, pair=False, hidden=True)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Print versions, devices and backends, and what is missing; or examine a model:
    which of its weight gradients can wait for W, and why the others cannot.
    """

    model: str | None = flag(
        "a function that returns a module and its inputs, or hf:config.json",
        None,
        metavar="MODULE:FUNCTION",
    )
    compile: Literal["off", "blocks"] = flag(
        "examine the model compiled, block by block", "off"
    )

    def run(self) -> None:
        """Print one fact a line."""
        if self.model is None:
            print("\n".join(report_lines()))
        else:
            print_split(self.model, compile=self.compile == "blocks")


_COMMANDS: dict[str, type] = {
    "plan": Plan,
    "show": Show,
    "compare": Compare,
    "mesh": Mesh,
    "playground": Playground,
    "train": TrainCommand,
    "bench": Bench,
    "profile": ProfileCommand,
    "estimate": EstimateCommand,
    "doctor": Doctor,
}
_FORMER: dict[str, type] = {"plot": Plot, "trace": Trace}
"""Commands that were their own; they are part of others now."""


def _parse(words: Sequence[str]) -> Any:
    """Make the command that the words name; None once help has been printed."""
    if not words:
        raise RequestError(f"no command is given; choose {', '.join(_COMMANDS)}")
    name, *rest = words
    if name == "compare" and any(word.startswith("--devices") for word in rest):
        name = "mesh"
    known = {**_COMMANDS, **_FORMER}
    known = {name: known[name]} if name in known else known  # the others take time
    app = application(known, former=tuple(_FORMER))
    return parse(app, [name, *rest])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if sys.stdout is None:  # closed by the caller: `zbpp show ... >&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    words = sys.argv[1:] if arguments is None else arguments
    try:
        command = _parse(words)
        if command is not None:  # help was asked for
            command.run()
        sys.stdout.flush()
    except RequestError as error:
        print(f"zbpp: {error}", file=sys.stderr)
        return 2
    except WorkerError as error:
        print(f"zbpp: {error}", file=sys.stderr, flush=True)
        if arguments is None:  # tearing torch down would take most of a second
            print(end="", flush=True)
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
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"zbpp: the output is lost: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0
