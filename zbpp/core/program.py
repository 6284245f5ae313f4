"""An order with its messages: what the runtime executes."""

from dataclasses import dataclass

from zbpp.core.jobs import Job, Value

__all__ = ["Instruction", "Program", "Receive", "Send"]


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


Instruction = Job | Send | Receive

Program = tuple[Instruction, ...]
"""The instructions of one stage, in the order in which it runs them."""
