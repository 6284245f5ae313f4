"""The ``zbpp`` command: one dataclass a command, its fields are the flags.

Every flag may be written with hyphens or underscores. Exit codes: 0 done, 2 the
request was wrong or cannot be met, 1 a fault of ours or of the machine.
"""

import errno
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from zbpp.cli.bench import Bench
from zbpp.cli.doctor import report_lines
from zbpp.cli.estimate import EstimateCommand
from zbpp.cli.flags import ScheduleFlags
from zbpp.cli.outputs import check_outputs, check_picture
from zbpp.cli.parser import application, parse
from zbpp.cli.pictures.compare import Compare
from zbpp.cli.pictures.drawings import draw_file
from zbpp.cli.pictures.meshes import Mesh
from zbpp.cli.plan import Plan
from zbpp.cli.playground.command import Playground
from zbpp.cli.profile import Profile
from zbpp.cli.report import print_report
from zbpp.cli.split_report import print_split
from zbpp.cli.summary import steady, summarize
from zbpp.cli.train import Train
from zbpp.core import (
    RequestError,
    WorkerError,
)
from zbpp.training.options import flag

__all__ = ["Bench", "Compare", "Doctor", "Mesh", "Plan", "Show", "main"]


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

    def run(self) -> None:
        """Print the report, or write the file and name it."""
        if self.out is not None:
            self._draw(self.out)
            return
        loaded = self.load_plans()
        if len(loaded) > 1:
            raise RequestError(
                "several schedules are named; with --out they are drawn on one time "
                "axis, and zbpp compare has figures of them"
            )
        (plan,) = loaded
        schedule, costs = plan.schedule, plan.costs
        if self.json:
            summary, among = summarize(schedule, costs), steady(schedule, costs)
            print(json.dumps(asdict(summary) | asdict(among)))
        else:
            drawn = self.timelines(schedule, costs) if self.iterations != 1 else ()
            print_report(schedule, costs, drawn, costs_named=self.costs_named(plan))

    def _draw(self, out: Path) -> None:
        check_outputs(out=out)
        if out.suffix.lower() != ".json":
            check_picture(out)
        draw_file(self, self.load(), out)
        print(out)


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
    compile: bool = flag(
        "examine the model compiled, block by block", False, pair=False
    )

    def run(self) -> None:
        """Print one fact a line."""
        if self.model is None:
            print("\n".join(report_lines()))
        else:
            print_split(self.model, compile=self.compile)


_COMMANDS: dict[str, type] = {
    "plan": Plan,
    "show": Show,
    "compare": Compare,
    "mesh": Mesh,
    "playground": Playground,
    "train": Train,
    "bench": Bench,
    "profile": Profile,
    "estimate": EstimateCommand,
    "doctor": Doctor,
}


def _parse(words: Sequence[str]) -> Any:
    """Make the command that the words name; None once help has been printed."""
    if not words:
        raise RequestError(f"no command is given; choose {', '.join(_COMMANDS)}")
    name = words[0]
    near = get_close_matches(name, ("--version", "--help"), n=1)
    if near and near != [name]:
        raise RequestError(f"unknown flag {name!r}; did you mean {near[0]}?")
    # the others take time
    commands = {name: _COMMANDS[name]} if name in _COMMANDS else _COMMANDS
    return parse(application(commands), words)


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
            "zbpp: this needs torch; install it: pip install 'zbpp[train]'",
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
