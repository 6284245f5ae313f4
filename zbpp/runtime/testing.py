"""A seam for tests: faults, small limits, plain kernels. zbpp never imports it.

    inject("kill:1:3:0F2")             rank 1 gets SIGKILL at job 0F2 of step 3
    with small_buckets():              optimizers step many small parts
    with plain_kernels() as graphs:    compiled layers take no C++ compiler

Everything here wraps the runtime from outside, so steps without it pay nothing.
The names are for the tests of zbpp and may change with any version.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch

from zbpp.runtime import executor
from zbpp.runtime.optim import rollback, stage_optimizer
from zbpp.runtime.optim.optimizers import StageOptimizers
from zbpp.runtime.replay import Replay

__all__ = [
    "inject",
    "plain_kernels",
    "small_buckets",
]

_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
}
_PARTS_OF_VALIDATION: Sequence[tuple[Any, str, str]] = (
    (StageOptimizers, "commit", "commit"),
    (StageOptimizers, "undo", "undo"),
    (stage_optimizer, "multiply_gradients", "redo"),
    (Replay, "rewind", "replay"),
)


def inject(fault: str) -> ExitStack:
    """Make this process fail.

    Args:
        fault: ``kind:rank:step:place``. The kinds ``kill``, ``stop``, ``term`` and
            ``int`` send this process that signal; ``raise`` raises a `RuntimeError`,
            ``memory`` torch's `OutOfMemoryError`. Other ranks are left alone. Steps
            count from 0.
            A place is a job, as in ``0F2``, or a part of a validation: ``commit``,
            ``undo``, ``redo``, ``replay``; those of step 2 come in step 3.

    Returns:
        A context manager that removes the fault at its end.
    """
    kind, rank, step, place = fault.split(":")
    installed = ExitStack()
    if os.environ.get("RANK", "0") != rank:
        return installed
    running: list[Any] = [None]

    def strike() -> None:
        if running[0].stage.batch.step != int(step):
            return
        if kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[kind])
        elif kind == "memory":
            raise torch.OutOfMemoryError("memory has run out, as the test asks")
        else:
            raise RuntimeError("a fault that the test asks for")

    def struck(handler: Callable[..., None]) -> Callable[..., None]:
        def run(executor: Any, instruction: Any) -> None:
            running[0] = executor
            if str(instruction) == place:
                strike()
            handler(executor, instruction)

        return run

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            strike()
            return function(*args, **kwargs)

        return run

    handlers = dict(executor.HANDLERS)
    installed.callback(executor.HANDLERS.update, handlers)
    executor.HANDLERS.update({kind: struck(x) for kind, x in handlers.items()})
    for target, name, part in _PARTS_OF_VALIDATION:
        if part == place:
            installed.callback(setattr, target, name, getattr(target, name))
            setattr(target, name, before(getattr(target, name)))
    return installed


@contextmanager
def small_buckets(n_bytes: int = 400) -> Iterator[None]:
    """Let optimizers on CPUs step parts of at most so many bytes of parameters."""
    sizes = rollback._BUCKET_BYTES
    before = dict(sizes)
    sizes["cpu"] = n_bytes
    try:
        yield
    finally:
        sizes.update(before)


@contextmanager
def plain_kernels() -> Iterator[list[Any]]:
    """Compile layers to graphs, run these by torch's operators, and list them.

    Torch's cache of compiled code is cleared before and after.
    """
    compiler: Any = import_module("torch._inductor.compile_fx")
    graphs: list[Any] = []

    def compile_graph(graph: Any, _: Any, **__: Any) -> Callable[..., Any]:
        graphs.append(graph)

        def run(arguments: list[Any]) -> Any:
            taken = tuple(arguments)
            arguments.clear()
            return graph.forward(*taken)

        run._boxed_call = True  # type: ignore[attr-defined]
        graph.recompile()
        return run

    before = compiler.compile_fx_inner
    torch._dynamo.reset()
    compiler.compile_fx_inner = compile_graph
    try:
        yield graphs
    finally:
        compiler.compile_fx_inner = before
        torch._dynamo.reset()
