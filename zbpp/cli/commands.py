"""The ``zbpp`` command: one dataclass a command, its fields are the flags.

Every flag may be written with hyphens or underscores. Exit codes: 0 done, 2 the
request was wrong or cannot be met, 1 a fault of ours or of the machine.
"""

import errno
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from cyclopts import App, CycloptsError, Parameter

from zbpp.cli.bench import Bench
from zbpp.cli.compare import Compare
from zbpp.cli.doctor import Doctor
from zbpp.cli.estimate import EstimateCommand
from zbpp.cli.mesh import Mesh
from zbpp.cli.outputs import Terminal
from zbpp.cli.plan import Plan
from zbpp.cli.playground import Playground
from zbpp.cli.profile import Profile
from zbpp.cli.show import Show
from zbpp.cli.train import Train
from zbpp.core import RequestError, WorkerError

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


def _application() -> App:
    app = App(
        name="zbpp",
        help="Plan, simulate and run zero-bubble pipeline schedules.\n\n"
        "A mode or a schedule file needs no flag; lists have commas or spaces. zbpp "
        "COMMAND --help has the flags.",
        help_format="plaintext",
        console=Terminal(),
        version=lambda: f"zbpp {version('zbpp')}",
        default_parameter=Parameter(
            name_transform=str,
            negative_bool="no_",
            negative_iterable=(),
            allow_repeating=True,
        ),
    )
    for place, (name, command) in enumerate(_COMMANDS.items()):
        app.command(command, name=name, sort_key=place)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    if sys.stdout is None:  # closed by the caller: `zbpp show ... >&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    words = sys.argv[1:] if arguments is None else [*arguments]
    try:
        command = _application()(
            words,
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
        if command is not None:  # help was asked for
            command.run(words)
        sys.stdout.flush()
    except (CycloptsError, RequestError) as error:
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
