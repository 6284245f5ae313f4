"""Add the messages to a schedule: sends, and receives that are posted early.

One stage hands its values to another through a channel that keeps their order:

    stage 0 | F0 send(F0) F1 send(F1) ...
                   \\          \\            channel 0 -> 1: F0 F1 ...
    stage 1 | post(F0) post(F1) F0 post(F2) F1 ...

A value is sent as soon as it is computed. Its receive is posted before the job that
reads it, so that it can travel while the stage computes, and so that a stage has
buffers only for what it will read next. As a channel keeps the order of its sends, a
receive is posted earlier still where a later message is needed first.

A V that finds the last step invalid lets its stage replay the passes before it:

    passes   stage 0 | F0> F1> V ...           stage 1 | +F0 F0 +F1 V F1 ...
    fails    stage 0 | F0> F1> V F0> F1> ...   stage 1 | +F0 F0 +F1 V +F0 F0 +F1 F1 ...

All stages fail together. So what is sent before a V is received, even if it is not yet
read, before the V of the other end, and what is sent after it, after it: then each
channel carries the same messages in the same order at both ends in either case.

A parameter that several chunks use has a gradient in each. A chunk sends its
gradient after its last W, to every other stage with the parameter, and all
add them up:

    chunk 0 on stage 0 | ... 0W7 send(tie) ... +tie add reduce O
    chunk 3 on stage 3 | ... 3W7 send(tie) ... +tie add reduce O

Where replicas of a stage add up their gradients, it sends after the REDUCE_WAIT.

A stage posts its receives early enough to lose no time, and so that it is safe. What
receives on the host (gloo) stops no job. But a sender waits for word that the
receive is posted, and that word takes as long as the value that follows it:

    stage 0 |         F0 . . .         both take 3 jobs: a receive that is posted
                .--'     `-.           6 jobs before its reader, and some more in
    stage 1 | +F0 . . . . . . F0       case, delays no job

What receives on the device (NCCL) stops every job that waits for the whole device. So
all jobs of all stages are put in one order in which they can end, and a receive is
posted before the first job that ends after its sender. A job then waits for no other
than those that end before it, and none for itself:

    stage 0 | F0 F1 F2 ...             F2 of stage 0 ends while stage 1 is in BW0
    stage 1 | .. F0 +F2 BW0 F2 ...
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from zbpp.core import (
    AddTied,
    Check,
    ChunkCosts,
    Collective,
    Costs,
    Instruction,
    Job,
    JobGraph,
    Message,
    Pass,
    PassKind,
    Placement,
    Program,
    Receive,
    Reduce,
    Schedule,
    Segment,
    Send,
    Step,
    TiedGradient,
    Value,
    at_check,
    begun_by,
    ended_by,
    kind_of,
    members_of,
    output_of,
    reader,
    reads,
    writes,
)
from zbpp.core.text import mistake
from zbpp.schedules.passes.parts import Columns, in_segments

Orders: TypeAlias = Sequence[Sequence[Job | Segment]]

Posting: TypeAlias = Callable[[int, Message, int, tuple[int, int]], int]
"""The column of a stage's order before which it posts the receive of a message.

It depends on the stage, the message, the column that reads it, and the stage and the
column behind which it is sent.
"""

Channel = tuple[int, int]
"""(sending stage, receiving stage)."""

Sent = tuple[Message, int]
"""A message, and the column of its sender's order behind which it leaves."""

Ties = Sequence[Sequence[int]]
"""Of each parameter that several chunks or layers use, the chunks."""


def lower(
    schedule: Schedule,
    *,
    ahead: int = 2,
    costs: Costs | None = None,
    on_device: bool = False,
    ties: Ties = (),
    overlaps: bool = False,
    adds_up: bool = False,
) -> tuple[Program, ...]:
    """Make a program of every order; one without a Step steps at its end.

    Args:
        schedule: what to run.
        ahead: how many jobs before its reader a receive is posted, at least 0;
            collectives do not count. The delay of its link comes on top of it.
        costs: what the schedule was planned for; None: jobs of equal length, and links
            without delay.
        on_device: receives occupy the device until their values come (NCCL). Each is
            then posted in the job in which its sender ends by the costs, whatever
            ``ahead`` is: no job that waits for its device waits for itself.
        ties: chunks of each parameter that several layers use.
        overlaps: passes in parts are cut into segments (`in_segments`), and a `Pair`
            stays one instruction, with what its passes send behind it. False takes
            pairs apart, and leaves every pass in one piece.
        adds_up: where there are segments, replicas add the gradients of a chunk up
            behind its last W; orders of whole passes have collectives for it.

    Raises:
        ScheduleError: before its V a stage reads what another one computes after its V.
    """
    columns, placement = None, schedule.placement
    times = (costs or Costs()).on(placement)
    orders: Sequence[list[Job | Segment]]
    if overlaps and schedule.parts is not None:
        orders, columns = in_segments(schedule, times, adds_up=adds_up)
    else:
        orders = [
            [x for job in order for x in ((job,) if overlaps else members_of(job))]
            for order in schedule.orders
        ]
    for stage, order in enumerate(orders):
        order += [] if Step(stage) in order else [Step(stage)]
    _check_validation(placement, orders)
    posting = (
        when_sent(orders, times, columns)
        if on_device
        else in_time(orders, times, ahead, columns)
    )
    return _lower_orders(placement, orders, posting, ties)


def lower_forward(placement: Placement, *, n_microbatches: int) -> tuple[Program, ...]:
    """Make programs that only run forwards, for evaluation.

    As many micro-batches as there are stages go through all chunks together. Every
    stage follows the same order over the whole model, so none waits for another in a
    circle. Receives stand before their readers: a header comes first.
    """
    n_stages = placement.n_stages
    orders: list[list[Job]] = [[] for _ in range(n_stages)]
    for first in range(0, n_microbatches, n_stages):
        for chunk, stage in enumerate(placement.stage_of):
            for i in range(first, min(first + n_stages, n_microbatches)):
                orders[stage].append(Pass(PassKind.F, chunk, i))
    times = Costs().on(placement)
    posting = in_time(orders, times, 0)
    return _lower_orders(placement, orders, posting)


def _lower_orders(
    placement: Placement,
    orders: Orders,
    posting: Posting,
    ties: Ties = (),
) -> tuple[Program, ...]:
    sends = [_sends(placement, order, ties) for order in orders]
    channels: dict[Channel, list[Sent]] = defaultdict(list)
    for stage, of_stage in enumerate(sends):
        for column, behind in sorted(of_stage.items()):
            for send in behind:
                channels[stage, send.peer].append((send.value, column))
    sent_early = _sent_before_checks(placement, orders)
    programs = []
    for stage, order in enumerate(orders):
        posts = _posts(placement, order, stage, channels, sent_early, posting)
        program: list[Instruction] = []
        for column, job in enumerate(order):
            program += posts[column]
            if isinstance(job, Step):
                if any(placement.stage_of[c] == stage for tie in ties for c in tie):
                    program.append(AddTied(stage))
                program.append(Reduce(stage))
            program.append(job)
            program += sends[stage].get(column, ())
        programs.append(tuple(program))
    return tuple(programs)


def _sends(
    placement: Placement, order: Sequence[Instruction], ties: Ties
) -> dict[int, list[Send]]:
    """Return the sends behind each column: values, then gradients of tied parameters.

    A chunk sends these behind its last W, or behind the wait for their sum.
    """
    sends: dict[int, list[Send]] = defaultdict(list)
    last: dict[int, int] = {}
    for column, job in enumerate(order):
        for ended in ended_by(job):
            if (value := output_of(ended, placement.n_chunks)) is not None:
                peer = placement.stage_of[reader(value)]
                if peer != placement.stage_of[value.chunk]:
                    sends[column].append(Send(value, peer))
        for done in (job,) if isinstance(job, Collective) else ended_by(job):
            if kind_of(done).ends_gradients:
                last[done.chunk] = column
    for tie, chunks in enumerate(ties):
        stages = {placement.stage_of[chunk] for chunk in chunks}
        for chunk in sorted(last.keys() & set(chunks)):
            for peer in sorted(stages - {placement.stage_of[chunk]}):
                sends[last[chunk]].append(Send(TiedGradient(tie, chunk), peer))
    return sends


def _posts(
    placement: Placement,
    order: Sequence[Job | Segment],
    stage: int,
    channels: dict[Channel, list[Sent]],
    sent_early: set[Value],
    posting: Posting,
) -> dict[int, list[Instruction]]:
    """The receives to post before each column of a stage's order."""
    needed_at: dict[Message, int] = {
        value: column
        for column, job in enumerate(order)
        for begun in begun_by(job)
        for value in reads(begun, placement.n_chunks)
    }
    check = order.index(Check(stage)) if Check(stage) in order else None
    posts: dict[int, list[Instruction]] = defaultdict(list)
    for (source, target), messages in sorted(channels.items()):
        if target != stage:
            continue
        columns: list[int] = []
        first = len(order)
        for value, sent in reversed(messages):
            need = needed_at.get(value, len(order) - 1)
            column = posting(stage, value, need, (source, sent))
            first = min(first, column)
            columns.append(first)
        for (value, _), column in zip(messages, reversed(columns), strict=True):
            if check is not None:
                early = value in sent_early
                column = min(column, check) if early else max(column, check + 1)
            posts[column].append(Receive(value, source))
    return posts


def _sent_before_checks(placement: Placement, orders: Orders) -> set[Value]:
    """Collect the values that the stages compute before their V's."""
    return {
        value
        for order in orders
        for job in at_check(tuple(order))[0]
        for ended in ended_by(job)
        for value in writes(ended, placement.n_chunks)
    }


def _check_validation(placement: Placement, orders: Orders) -> None:
    """Nothing that is read before a V may be computed after another stage's V."""
    early = _sent_before_checks(placement, orders)
    for stage, order in enumerate(orders):
        for column, job in enumerate(at_check(tuple(order))[0]):
            for value in (
                v for x in begun_by(job) for v in reads(x, placement.n_chunks)
            ):
                if value in early:
                    continue
                source = placement.stage_of[value.chunk]
                raise mistake(
                    orders,
                    stage,
                    column,
                    f"{job} comes before V, but reads the {value}, which stage "
                    f"{source} computes after its V; move the V of stage {stage} "
                    f"before {job}",
                )


# ---- Receives.


def in_time(
    orders: Orders, times: ChunkCosts, ahead: int, columns: Columns | None = None
) -> Posting:
    """Post receives some jobs before their readers, and two delays of their links.

    Collectives and further segments do not count as jobs. Where there are segments,
    it is known when the columns run.
    """
    places = [
        [c for c, job in enumerate(order) if not _goes_on(job)] for order in orders
    ]
    if not any(times.hops):
        columns = None
    elif columns is None:
        columns = _columns_of(orders, times)

    def column(stage: int, message: Message, need: int, _: tuple[int, int]) -> int:
        place = max(0, bisect_right(places[stage], need) - 1 - ahead)
        early = places[stage][place]
        if columns is None or isinstance(message, TiedGradient):
            return early
        starts, ends, _numbers = columns
        delay = times.delay(message.chunk, reader(message))
        return min(early, bisect_right(ends[stage], starts[stage][early] - 2 * delay))

    return column


def when_sent(
    orders: Orders, times: ChunkCosts, columns: Columns | None = None
) -> Posting:
    """Post each receive before the first job that ends after its sender."""
    numbers = _in_order_of_ends(orders, columns or _columns_of(orders, times))
    return lambda stage, _message, _need, sender: bisect_right(
        numbers[stage], numbers[sender[0]][sender[1]]
    )


def _goes_on(job: Job | Segment) -> bool:
    """True of what is no separate job: a collective, or more of a pass."""
    return isinstance(job, Collective) or (isinstance(job, Segment) and not job.begins)


def _columns_of(orders: Orders, times: ChunkCosts) -> Columns:
    """Time every column of every order; what is no pass takes no time."""
    rows = [[job for job in x if not isinstance(job, Segment)] for x in orders]
    none = (0.0,) * times.placement.n_chunks
    passes_alone = replace(
        times, optimizer=none, validation=none, all_gather=none, reduce_scatter=none
    )
    run = JobGraph(rows, passes_alone, barrier=False).run()
    # passes of equal length: each starts later than all that it waits for
    equal = JobGraph(rows, Costs().on(times.placement), barrier=False).run()
    return Columns(*map(run.by_row, (run.starts, run.ends, equal.starts)))


def _in_order_of_ends(orders: Orders, columns: Columns) -> list[list[int]]:
    """Number all jobs in an order in which they can end; by stage and column.

    What comes before the V's comes first, as it may be replayed without the rest, and
    the Steps last, as they wait for all stages.
    """
    jobs: list[tuple[int, float, float, int, int]] = []
    for stage, order in enumerate(orders):
        check = order.index(Check(stage)) if Check(stage) in order else -1
        for column, job in enumerate(order):
            phase = (column >= check) + (column > check) + isinstance(job, Step)
            end, number = columns.ends[stage][column], columns.numbers[stage][column]
            jobs.append((phase, end, number, stage, column))
    numbers = [[0] * len(order) for order in orders]
    for number, (*_, stage, column) in enumerate(sorted(jobs)):
        numbers[stage][column] = number
    return numbers
