"""Programs: orders with their messages, as the runtime executes them."""

from dataclasses import dataclass

from zbpp.core.jobs import Check, Job, Value

__all__ = [
    "Instruction",
    "Program",
    "Receive",
    "Reduce",
    "Send",
    "at_check",
]


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


def at_check(program: Program) -> tuple[Program, Program]:
    """Cut a program before its V; without one, nothing stands before the cut."""
    for column, instruction in enumerate(program):
        if isinstance(instruction, Check):
            return program[:column], program[column:]
    return (), program
