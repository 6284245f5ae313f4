"""Reports of the simulated device name the job of a pipeline, as its trace does."""

from typing import Any

from simgpu import native
from zbpp.runtime import executor


def name_jobs() -> None:
    """Label what each handler does by its instruction and the stage's chunks."""
    for kind, handler in executor.HANDLERS.items():
        executor.HANDLERS[kind] = _labelled(handler)


def _labelled(handler: executor.Handler) -> executor.Handler:
    def run(of: executor.Executor, instruction: Any) -> None:
        native.label(
            f"{instruction} of the stage with chunks {sorted(of.stage.chunks)}"
        )
        try:
            handler(of, instruction)
        finally:
            native.label("")

    return run
