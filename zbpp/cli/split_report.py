"""Table of a model's weight gradients: those that wait for W, and those that cannot.

    zbpp doctor --model my_package.my_module:build

calls ``build()``, which returns a module and its inputs, or a model, its batch and its
loss, and runs one forward.
"""

from collections.abc import Callable
from typing import Any

from rich.table import Table

from zbpp.cli.outputs import Terminal
from zbpp.core import RequestError
from zbpp.training.options import HF
from zbpp.training.user_model import UserModel, call_builder, load_model

__all__ = ["examine", "print_split"]


_WANTED = (
    "it must be a function that returns a pair: a module, and its inputs (a tensor or "
    "a tuple of them); or (model, batch, loss_fn) as for zbpp.Pipeline"
)


def _load(name: str) -> tuple[Any, tuple[Any, ...]]:
    """Call ``module:function`` and return a module and the inputs that it gets.

    A model of layers is run as a whole. Its batch is a pair of inputs and targets, as a
    plain module's is if there is a loss.
    """
    from torch import nn

    from zbpp.models import Layered
    from zbpp.models.hugging_face import is_pretrained
    from zbpp.runtime.values import as_tensors, as_value

    if name.startswith(HF):
        return _of_layers(load_model(name))
    built = call_builder(name, _WANTED)
    if not isinstance(built, tuple) or len(built) not in (2, 3):
        raise RequestError(f"--model {name}: {_WANTED}")
    model, batch = built[:2]
    if isinstance(model, Layered) or is_pretrained(model):
        return _of_layers(load_model(name))
    layers: list[Any] | None = None
    if isinstance(model, list | nn.ModuleList):
        layers = list(model)
    elif isinstance(model, tuple):
        is_builder = len(model) == 2 and isinstance(model[1], int)
        layers = list(model[0](range(model[1])) if is_builder else model)
    if layers is not None:
        model = nn.Sequential(*layers)
    if not callable(model):
        raise RequestError(f"--model {name}: {_WANTED}")
    is_pair = isinstance(batch, tuple) and len(batch) == 2
    if is_pair and (len(built) == 3 or isinstance(model, nn.Sequential)):
        batch = batch[0]
        if isinstance(model, nn.Sequential):
            return model, (as_value(as_tensors(batch)),)
    return model, batch if isinstance(batch, tuple) else (batch,)


def _of_layers(user: UserModel) -> tuple[Any, tuple[Any, ...]]:
    """All layers of a cut model, one after the other."""
    from torch import nn

    return nn.Sequential(*user.layers()), (user.inputs,)


def examine(
    name: str, *, compile: bool = False
) -> tuple[list[tuple[str, str, str]], str]:
    """Run one forward of a model.

    Args:
        name: ``module:function``, or a model of transformers.
        compile: compile it first: its layers if it has such, else the whole.

    Returns:
        A row for each parameter (name, shape, where its gradient is computed), and
        `summarize_split`.
    """
    from zbpp.diagnostics import summarize_split
    from zbpp.runtime.backward.split import split_forward

    module, inputs = _load(name)
    run = _compiled(module) if compile else module
    report = split_forward(run, *inputs).report()
    rows, where, sizes = [], {}, {}
    for path, p in module.named_parameters():
        if p in report:
            where[path], sizes[path] = report[p], p.numel()
        text = report.get(p, "frozen" if not p.requires_grad else "unused")
        rows.append((path, " x ".join(map(str, p.shape)), text))
    if not where:
        raise RequestError(f"--model {name}: no parameter gets a gradient")
    return rows, summarize_split(where, sizes)


def _compiled(module: Any) -> Callable[..., Any]:
    from torch import nn

    from zbpp.runtime.chunk import Chunk
    from zbpp.runtime.compiled.backend import compiled
    from zbpp.runtime.driver.build import compiled_chunk

    if not isinstance(module, nn.Sequential):
        return compiled(module)
    chunk = compiled_chunk(Chunk(0, 0, tuple(module)), "blocks")
    return lambda value: chunk.run(value, {}, None)


def print_split(name: str, *, compile: bool = False) -> None:
    """Print what `examine` finds."""
    rows, summary = examine(name, compile=compile)
    table = Table("parameter", "shape", "gradient computed in")
    for row in rows:
        table.add_row(*row)
    Terminal(highlight=False).print(table)
    print(summary)
