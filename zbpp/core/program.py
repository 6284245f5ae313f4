"""An order with its messages: what the runtime executes."""

from dataclasses import dataclass

from zbpp.core.jobs import Job, Value

__all__ = ["Instruction", "Program", "Receive", "Reduce", "Send"]


@dataclass(frozen=True, slots=True)
class Send:
    """Hand a value to another stage; the stage goes on at once."""

    value: Value
    peer: int

    def __str__(self) -> str:
        return f"send {self.value} to stage {self.peer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Make room for a value of another stage; the pass that reads it waits for it."""

    value: Value
    peer: int

    def __str__(self) -> str:
        return f"receive {self.value} from stage {self.peer}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start the sum over all stages (gradient norm, loss) that the Step waits for."""

    stage: int

    def __str__(self) -> str:
        return "reduce the gradient norm over all stages"


Instruction = Job | Send | Receive | Reduce

Program = tuple[Instruction, ...]
"""The instructions of one stage, in the order in which it runs them."""
