"""Programs: orders with their messages, as the runtime executes them."""

from dataclasses import dataclass

from zbpp.core.jobs import Check, Job, Part, Pass, Value, passes_in


@dataclass(frozen=True, slots=True)
class TiedGradient:
    """A chunk's gradient of a parameter that several chunks use."""

    tie: int
    chunk: int

    def __str__(self) -> str:
        return f"gradient of tie {self.tie} in chunk {self.chunk}"


Message = Value | TiedGradient
"""A value that a stage sends to another."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a value to another stage; the stage continues at once."""

    value: Message
    peer: int

    def __str__(self) -> str:
        return f"send {self.value} to stage {self.peer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive of another stage's value; the job that reads it waits for it."""

    value: Message
    peer: int

    def __str__(self) -> str:
        return f"receive {self.value} from stage {self.peer}"


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start the sum over all stages (gradient norm, loss) that the Step waits for."""

    stage: int

    def __str__(self) -> str:
        return "reduce the gradient norm over all stages"


@dataclass(frozen=True, slots=True)
class AddTied:
    """Add up the chunks' gradients of tied parameters."""

    stage: int

    def __str__(self) -> str:
        return "add the gradients of tied parameters"


@dataclass(frozen=True, slots=True)
class Segment:
    """Run a pass from where it is up to its next communication.

    Args:
        part: of the plan, with which it begins.
        begins: the pass has not begun: take what it reads. A W begins with its last
            segment; until then it does no more than its B has left for it.
        left: segments of the pass that come behind; 0: run to the end of the pass.
    """

    part: Part
    begins: bool
    left: int

    def __str__(self) -> str:
        return str(self.part)


Instruction = Job | Segment | Send | Receive | Reduce | AddTied
"""A job, or a message or sum between jobs."""

Program = tuple[Instruction, ...]
"""The instructions of one stage, in the order in which it runs them."""


def at_check(program: Program) -> tuple[Program, Program]:
    """Cut a program before its V; without one, nothing is before the cut."""
    for column, instruction in enumerate(program):
        if isinstance(instruction, Check):
            return program[:column], program[column:]
    return (), program


def begun_by(instruction: Instruction) -> tuple[Pass, ...]:
    """The passes that begin with an instruction, and read their inputs there."""
    if isinstance(instruction, Segment):
        return (instruction.part.of,) if instruction.begins else ()
    return passes_in(instruction)


def ended_by(instruction: Instruction) -> tuple[Pass, ...]:
    """The passes that end with an instruction, and whose outputs are there then."""
    if isinstance(instruction, Segment):
        return () if instruction.left else (instruction.part.of,)
    return passes_in(instruction)
