"""Reports of the simulated device name the job of a pipeline, as its trace does."""

from typing import Any

from simgpu import native
from zbpp.runtime.bound import BoundProgram, Call


def name_jobs() -> None:
    """Label every call of a bound program by its instruction and its chunks."""
    bind = BoundProgram._bind

    def labelled(self: BoundProgram, instruction: Any) -> Call:
        call = bind(self, instruction)
        chunks = sorted(self._parts.stage.chunks)
        text = f"{instruction} of the stage with chunks {chunks}"

        def run(run: Any = call.run) -> object:
            native.label(text)
            try:
                return run()
            finally:
                native.label("")

        return call._replace(run=run)

    BoundProgram._bind = labelled  # type: ignore[method-assign]
