"""Programs as one word an instruction, for pictures."""

from zbpp.core import Check, Pass, Program, Receive, Send, Step, What

__all__ = ["short"]


def short(program: Program) -> str:
    """``+F0`` posts a receive, ``F0>`` sends, plain jobs are jobs."""
    words = []
    for instruction in program:
        match instruction:
            case Receive(value):
                words.append(f"+{'F' if value.what is What.ACTIVATION else 'B'}"
                             f"{value.microbatch}")  # fmt: skip
            case Send():
                words[-1] += ">"
            case Pass(kind, _, microbatch):
                words.append(f"{kind}{microbatch}")
            case Step():
                words.append("O")
            case Check():
                words.append("V")
    return " ".join(words)
