"""Table of a model's weight gradients: those that wait for W, and those that cannot.

    zbpp doctor --model my_package.my_module:build

calls ``build()``, which returns a module and its inputs, and runs one forward.
"""

import importlib
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from zbpp.core import RequestError

__all__ = ["examine", "print_split"]


def _load_model(name: str) -> tuple[Any, tuple[Any, ...]]:
    """Call ``module:function`` and return the module and the inputs that it returns.

    Raises:
        RequestError: there is no such function, or it returns something else.
    """
    path, _, attribute = name.partition(":")
    if not path or not attribute:
        raise RequestError(
            f"--model {name}: write it as module:function; the function returns a "
            "module and its inputs"
        )
    sys.path.insert(0, "")  # as python -m does
    try:
        build = getattr(importlib.import_module(path), attribute)
    except (ImportError, AttributeError) as error:
        raise RequestError(f"--model {name}: {error}") from error
    finally:
        sys.path.remove("")
    built = build() if callable(build) else None
    if not isinstance(built, tuple) or len(built) != 2 or not callable(built[0]):
        raise RequestError(
            f"--model {name}: it must be a function that returns a pair: a module, and "
            "its inputs (a tensor or a tuple of them)"
        )
    module, inputs = built
    return module, inputs if isinstance(inputs, tuple) else (inputs,)


def examine(name: str) -> tuple[list[tuple[str, str, str]], str]:
    """Run one forward of a model.

    Returns:
        A row for each parameter (name, shape, where its gradient is computed), and
        `summarize_split`.

    Raises:
        RequestError: there is no such function, it returns something else, or no
            parameter needs a gradient.
    """
    from zbpp.pipeline_reports import summarize_split
    from zbpp.runtime.backward.split import split_forward

    module, inputs = _load_model(name)
    report = split_forward(module, *inputs).report()
    rows, where, sizes = [], {}, {}
    for path, p in module.named_parameters():
        if p in report:
            where[path], sizes[path] = report[p], p.numel()
        text = report.get(p, "frozen" if not p.requires_grad else "unused")
        rows.append((path, " x ".join(map(str, p.shape)), text))
    if not where:
        raise RequestError(f"--model {name}: no parameter gets a gradient")
    return rows, summarize_split(where, sizes)


def print_split(name: str) -> None:
    """Print what `examine` finds.

    Raises:
        RequestError: as `examine`.
    """
    rows, summary = examine(name)
    table = Table("parameter", "shape", "gradient computed in")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
    print(summary)
