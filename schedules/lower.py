"""Add the messages to a schedule: sends, and receives that are posted early.

One stage hands its values to another through a channel that keeps their order:

    stage 0 | F0 send(F0) F1 send(F1) ...
                   \\          \\            channel 0 -> 1: F0 F1 ...
    stage 1 | post(F0) post(F1) F0 post(F2) F1 ...

A value is sent as soon as it is computed. Its receive is posted ``ahead`` jobs before
the job that reads it, so that it can travel while the stage computes, and so that a
stage holds buffers only for what it will read next. As a channel keeps the order of
its sends, a receive is posted earlier still where a later message is needed first.
"""

from collections import defaultdict
from collections.abc import Sequence

from zbpp.core import (
    Instruction,
    Pass,
    Placement,
    Program,
    Receive,
    Schedule,
    Send,
    Value,
    What,
    reads,
    writes,
)

__all__ = ["check_channels", "lower"]

Channel = tuple[int, int]
"""(sending stage, receiving stage)."""


def lower(schedule: Schedule, *, ahead: int = 2) -> tuple[Program, ...]:
    """Make a program of every order.

    Args:
        schedule: what to run.
        ahead: how many jobs before its reader a receive is posted, at least 0.
    """
    placement = schedule.placement
    channels = _messages(schedule)
    programs = []
    for stage, order in enumerate(schedule.orders):
        posts = _posts(schedule, stage, channels, ahead)
        program: list[Instruction] = []
        for column, job in enumerate(order):
            program += posts[column]
            program.append(job)
            if isinstance(job, Pass):
                for value in writes(job, placement.n_chunks):
                    peer = _reader(value, placement)
                    if peer != stage:
                        program.append(Send(value, peer))
        programs.append(tuple(program))
    check_channels(programs, placement)
    return tuple(programs)


def _reader(value: Value, placement: Placement) -> int:
    """The stage that reads a value."""
    chunk = value.chunk
    if value.what is What.ACTIVATION:
        chunk += 1
    elif value.what is What.GRADIENT:
        chunk -= 1
    return placement.stage_of[chunk]


def _messages(schedule: Schedule) -> dict[Channel, list[Value]]:
    """What each channel carries, in the order of the sends."""
    placement = schedule.placement
    channels: dict[Channel, list[Value]] = defaultdict(list)
    for stage, order in enumerate(schedule.orders):
        for job in order:
            if isinstance(job, Pass):
                for value in writes(job, placement.n_chunks):
                    peer = _reader(value, placement)
                    if peer != stage:
                        channels[stage, peer].append(value)
    return channels


def _posts(
    schedule: Schedule, stage: int, channels: dict[Channel, list[Value]], ahead: int
) -> dict[int, list[Instruction]]:
    """The receives to post before each column of a stage's order."""
    needed_at = {
        value: column
        for column, job in enumerate(schedule.orders[stage])
        if isinstance(job, Pass)
        for value in reads(job, schedule.placement.n_chunks)
    }
    posts: dict[int, list[Instruction]] = defaultdict(list)
    for (source, target), values in sorted(channels.items()):
        if target != stage:
            continue
        columns = []
        first_need = len(schedule.orders[stage])
        for value in reversed(values):
            first_need = min(first_need, needed_at[value])
            columns.append(max(0, first_need - ahead))
        for value, column in zip(values, reversed(columns), strict=True):
            posts[column].append(Receive(value, source))
    return posts


def check_channels(programs: Sequence[Program], placement: Placement) -> None:
    """Prove that both ends of every channel agree, and that no pass lacks an input.

    Transports that match messages by their order alone (NCCL) rely on it.
    """
    sent: dict[Channel, list[Value]] = defaultdict(list)
    received: dict[Channel, list[Value]] = defaultdict(list)
    for stage, program in enumerate(programs):
        here: set[Value] = set()
        for instruction in program:
            match instruction:
                case Send(value, peer):
                    assert value in here, f"stage {stage} sends {value} too early"
                    sent[stage, peer].append(value)
                case Receive(value, peer):
                    received[peer, stage].append(value)
                    here.add(value)
                case Pass():
                    for value in reads(instruction, placement.n_chunks):
                        assert value in here, (
                            f"stage {stage}: {instruction} lacks {value}"
                        )
                    here.update(writes(instruction, placement.n_chunks))
    assert sent == received, "a channel's ends disagree about its messages"
