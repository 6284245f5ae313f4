"""Reports of the simulated device name the job of a pipeline, as its trace does."""

from typing import Any

from simgpu import native
from zbpp.runtime import executor
from zbpp.runtime.executor import BoundProgram, Handler


def name_jobs() -> None:
    """Label every handler of a bound program by its instruction and its chunks."""
    for key, make in executor.HANDLERS.items():
        executor.HANDLERS[key] = _labelled(make)  # type: ignore[index]


def _labelled(make: Any) -> Any:
    def bind(bound: BoundProgram, instruction: Any) -> Handler:
        handler: Handler = make(bound, instruction)
        chunks = sorted(bound.executor.stage.chunks)
        text = f"{instruction} of the stage with chunks {chunks}"
        run = handler.run

        def labelled() -> None:
            native.label(text)
            try:
                run()
            finally:
                native.label("")

        handler.run = labelled  # type: ignore[method-assign]
        return handler

    return bind
