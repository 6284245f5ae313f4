"""Run programs without a device."""

from collections.abc import Sequence

from zbpp.core import Program, Receive, Reduce, Send, at_check


def replayed(program: Program) -> Program:
    """List all that a stage runs if its V finds the last step invalid."""
    before, rest = at_check(program)
    return (*before, *rest[:1], *before, *rest[1:]) if before else program


def channels(programs: Sequence[Program], end: type) -> dict[tuple[int, int], list]:
    """The messages of each channel, as its senders or its receivers see it."""
    found: dict[tuple[int, int], list] = {}
    for stage, program in enumerate(programs):
        for i in program:
            if isinstance(i, end):
                key = (i.peer, stage) if end is Receive else (stage, i.peer)
                found.setdefault(key, []).append(i.value)
    return found


def ends_agree(programs: Sequence[Program]) -> bool:
    """True if both ends of each channel have its messages in the same order.

    Transports that match messages by their order alone (NCCL) rely on it, also where a
    V fails and stages run a part of their programs twice.
    """
    again = [replayed(program) for program in programs]
    return all(
        channels(run, Send) == channels(run, Receive) for run in (programs, again)
    )


def ends_where_all_wait(programs: tuple[Program, ...]) -> bool:
    """True if a step ends although every job waits for its whole device.

    The allocator, ``torch.cuda.synchronize`` and the tuning of a kernel do. By NCCL a
    receive occupies the device from where it is posted until its value comes, a send
    until its receive is posted, a sum until all stages have begun it. A receive that is
    posted too early stops the job that its value depends on:

        stage 0 | F0> +B0 F1> BW0 ...      F1 waits for the gradient that BW0 sends,
        stage 1 | +F0 F0 +F1 BW0> F1 ...   BW0 for the activation that F1 sends
    """
    stages = range(len(programs))
    begun: set = set()
    open_on: list[set] = [set() for _ in stages]
    columns, before = [0 for _ in stages], None
    while before != columns:
        before = list(columns)
        for stage in stages:
            for instruction in programs[stage][columns[stage] :]:
                match instruction:
                    case Receive(value, _):
                        begun.add((Receive, value, stage))
                        open_on[stage].add((Send, value, stage))
                    case Send(value, peer):
                        begun.add((Send, value, peer))
                        open_on[stage].add((Receive, value, peer))
                    case Reduce():
                        begun.add((Reduce, stage))
                        open_on[stage] |= {(Reduce, other) for other in stages}
                    case _:
                        open_on[stage] -= begun
                        if open_on[stage]:
                            break
                columns[stage] += 1
    return columns == list(map(len, programs))
