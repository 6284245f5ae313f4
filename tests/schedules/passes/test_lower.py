"""Messages: both ends agree, receives are posted early, buffers stay few."""

from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_text import short
from trained_modes import MODES

from zbpp.core import (
    Check,
    Pass,
    Program,
    Receive,
    Schedule,
    ScheduleError,
    Send,
    Value,
    at_check,
    reads,
)
from zbpp.planning import plan
from zbpp.schedules import check_channels, lower, lower_forward, post_validated


def test_two_stages_of_1f1b() -> None:
    programs = lower(plan("1F1B", n_stages=2, n_microbatches=3), ahead=1)
    assert "\n".join(map(short, programs)) == dedent("""\
        F0> +B0 F1> BW0 +B1 F2> +B2 BW1 BW2 O
        +F0 F0 +F1 BW0> F1 +F2 BW1> F2 BW2> O""")


@given(
    mode=st.sampled_from(MODES),
    n_stages=st.integers(1, 6),
    n_microbatches=st.integers(1, 12),
    ahead=st.integers(0, 5),
)
def test_every_input_is_posted_in_time_and_not_much_earlier(
    mode: str, n_stages: int, n_microbatches: int, ahead: int
) -> None:
    schedule = plan(mode, n_stages=n_stages, n_microbatches=n_microbatches)
    n_chunks = schedule.placement.n_chunks
    in_flight = [0]
    for program in lower(schedule, ahead=ahead):
        posted: set[Value] = set()
        for instruction in program:
            match instruction:
                case Receive(value):
                    posted.add(value)
                case Pass():
                    posted.difference_update(reads(instruction, n_chunks))
            in_flight.append(len(posted))
        assert not posted
    # one buffer per look-ahead, and what a channel's order forces to come earlier
    assert max(in_flight) <= ahead + 1 + 2 * n_stages


@pytest.mark.parametrize("mode", MODES)
def test_forward_programs_pass_all_chunks(mode: str) -> None:
    placement = plan(mode, n_stages=3, n_microbatches=1).placement
    for n_microbatches in (1, 2, 5):
        programs = lower_forward(placement, n_microbatches=n_microbatches)
        passes = [i for program in programs for i in program if isinstance(i, Pass)]
        assert len(set(passes)) == len(passes) == placement.n_chunks * n_microbatches


def test_ends_that_disagree_are_noticed() -> None:
    schedule = plan("ZBH1", n_stages=2, n_microbatches=3)
    programs = [list(program) for program in lower(schedule)]
    check_channels([tuple(p) for p in programs], schedule.placement)
    at = [i for i, x in enumerate(programs[1]) if isinstance(x, Receive)]
    row = programs[1]
    row[at[0]], row[at[1]] = row[at[1]], row[at[0]]
    with pytest.raises(AssertionError):
        check_channels([tuple(p) for p in programs], schedule.placement)
    del row[at[0]]
    with pytest.raises(AssertionError, match="lacks"):
        check_channels([tuple(p) for p in programs], schedule.placement)


def test_a_schedule_without_steps_steps_at_its_end() -> None:
    full = plan("ZBH1", n_stages=2, n_microbatches=2)
    bare = Schedule("bare", full.placement, 2, tuple(o[:-1] for o in full.orders))
    assert lower(bare) == lower(full)


# Post-validation: V marks it, and what stands before it may run twice.


def test_two_stages_with_a_v() -> None:
    programs = lower(post_validated(plan("ZBH1", n_stages=2, n_microbatches=3)))
    assert "\n".join(map(short, programs)) == dedent("""\
        F0> F1> V +B0 B0 +B1 W0 F2> +B2 B1 W1 B2 W2 O
        +F0 F0 +F1 V B0> F1 +F2 B1> W0 F2 B2> W1 W2 O""")


@given(
    mode=st.sampled_from((*MODES, "ZB", "ZBVPP", "VHalf", "VMin")),
    n_stages=st.integers(1, 6),
    n_microbatches=st.integers(1, 12),
    ahead=st.integers(0, 5),
)
def test_channels_agree_whether_v_passes_or_fails(
    mode: str, n_stages: int, n_microbatches: int, ahead: int
) -> None:
    schedule = post_validated(
        plan(mode, n_stages=n_stages, n_microbatches=n_microbatches, effort="fast")
    )
    programs = lower(schedule, ahead=ahead)  # has checked its channels
    again = [replayed(program) for program in programs]
    for program, twice in zip(programs, again, strict=True):
        before, rest = at_check(program)
        posted = {i.value for i in before if isinstance(i, Receive)}
        late = {i.value for i in rest if isinstance(i, Receive)}
        assert not posted & late
        assert len(twice) == len(program) + len(before)
    assert channels(again) == channels(again, receives=True)


def replayed(program: Program) -> Program:
    """List all that a stage runs if its V finds the last step invalid."""
    before, rest = at_check(program)
    return (*before, *rest[:1], *before, *rest[1:]) if before else program


def channels(
    programs: list[Program], *, receives: bool = False
) -> dict[tuple[int, int], list[Value]]:
    """The messages of each channel, as its senders or its receivers see it."""
    found: dict[tuple[int, int], list[Value]] = {}
    for stage, program in enumerate(programs):
        for i in program:
            if isinstance(i, Receive if receives else Send):
                ends = (i.peer, stage) if receives else (stage, i.peer)
                found.setdefault(ends, []).append(i.value)
    return found


def test_a_receive_on_the_wrong_side_of_v_is_noticed() -> None:
    """In a run that passes V both ends agree; in one that does not they would not."""
    schedule = post_validated(plan("ZBH1", n_stages=2, n_microbatches=3))
    programs = [list(program) for program in lower(schedule)]
    row = programs[1]
    at = row.index(Check(1))
    late = next(i for i in range(at, len(row)) if isinstance(row[i], Receive))
    row.insert(at, row.pop(late))
    with pytest.raises(AssertionError, match="disagree"):
        check_channels([tuple(p) for p in programs], schedule.placement)


def test_a_v_that_would_need_another_stages_later_work_is_refused() -> None:
    good = post_validated(plan("ZBH1", n_stages=2, n_microbatches=3))
    rows = [list(order) for order in good.orders]
    rows[0].remove(Check(0))
    rows[0].insert(0, Check(0))  # F0 of stage 1 comes before V, F0 of stage 0 does not
    wrong = Schedule("wrong", good.placement, 3, tuple(map(tuple, rows)))
    with pytest.raises(ScheduleError) as caught:
        lower(wrong)
    assert "1F0 comes before V, but reads the activation of chunk 0" in str(
        caught.value
    )
    assert "stage 0 computes after its own V" in str(caught.value)
    rows[1].remove(Check(1))
    rows[1].insert(0, Check(1))
    lower(Schedule("early", good.placement, 3, tuple(map(tuple, rows))))
