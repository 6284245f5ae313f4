"""Iterations that follow one another: drawn by hand, and waiting for what they must."""

from dataclasses import replace
from textwrap import dedent

import pytest
from hypothesis import given
from timed_schedules import timed_schedules

from zbpp.core import (
    Check,
    Costs,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    Slot,
    Step,
    draw,
    parse_job,
    passes_in,
    reads,
    writes,
)
from zbpp.planning import plan
from zbpp.schedules import post_validated
from zbpp.simulator import join, makespan, simulate, simulate_iterations

F, B, W, BW = PassKind


def hand_made(*rows):
    orders = tuple(
        tuple(parse_job(cell, stage=stage) for cell in row.split())
        for stage, row in enumerate(rows)
    )
    return Schedule("hand-made", Placement.single(len(rows)), 2, orders)


BEHIND_A_BARRIER = hand_made(
    "0F0 0F1 0B0 0W0 0B1 0W1 O",
    "1F0 1B0 1F1 1B1 1W0 1W1 O",
)
POST_VALIDATED = hand_made(
    "0F0 0F1 V 0B0 0W0 0B1 0W1 O",
    "1F0 V 1B0 1F1 1B1 1W0 1W1 O",
)


def picture(schedule, costs, n_iterations=2, **options):
    timelines = simulate_iterations(schedule, costs, n_iterations, **options)
    return draw(join(timelines))


def test_behind_a_barrier_all_stages_wait_for_the_sum_and_start_together():
    drawn = picture(BEHIND_A_BARRIER, Costs(optimizer=1, reduction=1))
    assert drawn == dedent("""\
        0 | F0 F1 .  B0 W0 B1 W1 .  O  F0 F1 .  B0 W0 B1 W1 .  O
        1 | .  F0 B0 F1 B1 W0 W1 .  O  .  F0 B0 F1 B1 W0 W1 .  O""")


def test_post_validated_a_stage_steps_at_once_and_goes_on():
    drawn = picture(POST_VALIDATED, Costs(optimizer=1, reduction=1))
    assert drawn == dedent("""\
        0 | F0  F1  .   VB0 W0  B1  W1  O   F0  F1  .   VB0 W0  B1  W1  O
        1 | .   F0  VB0 F1  B1  W0  W1  O   .   F0  VB0 F1  B1  W0  W1  O""")


def test_a_v_waits_for_the_sum_of_all_stages():
    """Stage 1 has ended at 7; the sum is known at 11, when its V takes 1."""
    drawn = picture(POST_VALIDATED, Costs(optimizer=1, reduction=4, validation=1))
    assert drawn == dedent("""\
        0 | F0 F1 V  .  B0 W0 B1 W1 O  F0 F1 .  V  .  B0 W0 B1 W1 O
        1 | .  F0 V  B0 F1 B1 W0 W1 O  .  F0 .  V  B0 F1 B1 W0 W1 O""")


def test_a_failed_v_repeats_the_step_and_the_passes_before_it():
    drawn = picture(POST_VALIDATED, Costs(optimizer=1, validation=1), rolled_back=[1])
    assert drawn == dedent("""\
        0 | F0 F1 V  .  B0 W0 B1 W1 O  F0 F1 V  O  F0 F1 .  B0 W0 B1 W1 O
        1 | .  F0 V  B0 F1 B1 W0 W1 O  .  F0 V  O  .  F0 B0 F1 B1 W0 W1 O""")


def test_stages_that_are_done_earlier_start_earlier():
    schedule = plan("ZBH2", n_stages=2, n_microbatches=3)
    assert picture(schedule, Costs(optimizer=1)) == dedent("""\
        0 | F0 F1 F2 B0 W0 B1 W1 B2 W2 .  O  F0 F1 F2 B0 W0 B1 W1 B2 W2 .  O
        1 | .  F0 B0 F1 B1 F2 B2 W0 W1 W2 O  .  F0 B0 F1 B1 F2 B2 W0 W1 W2 O""")
    checked = post_validated(schedule)
    assert picture(checked, Costs(optimizer=1, validation=1)) == dedent("""\
        0 | F0 F1 F2 V  B0 W0 B1 W1 B2 W2 O  F0 F1 F2 V  B0 W0 B1 W1 B2 W2 O
        1 | .  F0 V  B0 F1 B1 F2 B2 W0 W1 W2 O  F0 V  B0 F1 B1 F2 B2 W0 W1 W2 O""")


def test_one_iteration_behind_a_barrier_is_what_simulate_times():
    schedule, costs = BEHIND_A_BARRIER, Costs(3, 2, 1, 0.5, 4, reduction=0)
    assert simulate_iterations(schedule, costs, 1) == [simulate(schedule, costs)]
    assert makespan(simulate(POST_VALIDATED, costs)) == makespan(
        simulate(schedule, costs)
    )
    bare = replace(schedule, orders=tuple(row[:-1] for row in schedule.orders))
    costs = Costs(optimizer=2, comm=0.25)  # without O it steps at its end
    assert simulate_iterations(bare, costs) == simulate_iterations(schedule, costs)


@pytest.mark.parametrize(
    ("schedule", "rolled_back"),
    [*((POST_VALIDATED, x) for x in ([0], [2], [-1], [1, 2])), (BEHIND_A_BARRIER, [1])],
)
def test_what_cannot_be_rolled_back_is_refused(schedule, rolled_back):
    with pytest.raises(RequestError, match="cannot be rolled back; the schedule needs"):
        simulate_iterations(schedule, Costs(), rolled_back=rolled_back)


@pytest.mark.parametrize("with_v", [False, True])
@given(case=timed_schedules())
def test_every_job_waits_for_all_that_it_needs(with_v, case):
    schedule, costs = case
    if with_v:
        schedule = post_validated(schedule)
    timelines = simulate_iterations(schedule, costs, 3)
    assert broken(schedule, costs, timelines) == []


@pytest.mark.parametrize("with_v", [False, True])
def test_a_job_that_comes_too_early_is_found(with_v):
    """Move each job in turn to before the one that it waited for."""
    schedule = POST_VALIDATED if with_v else BEHIND_A_BARRIER
    costs = Costs(comm=0.5, optimizer=1, reduction=4)
    timelines = simulate_iterations(schedule, costs, 2)
    row = timelines[1].rows[1]
    for column, slot in enumerate(row):
        early = Slot(slot.job, slot.start - 0.1, slot.end - 0.1)
        moved = (*row[:column], early, *row[column + 1 :])
        wrong = replace(timelines[1], rows=(timelines[1].rows[0], moved))
        assert broken(schedule, costs, [timelines[0], wrong]), slot


def broken(schedule, costs, timelines):
    """Find jobs that start before something that they need, in any iteration."""
    times = costs.on(schedule.placement)
    found, known, free = [], 0.0, [0.0] * schedule.n_stages
    for i, timeline in enumerate(timelines):
        slots = [slot for row in timeline.rows for slot in row]
        written = {
            value: slot
            for slot in slots
            for part in passes_in(slot.job)
            for value in writes(part, schedule.placement.n_chunks)
        }
        gradients = [
            slot.end
            for slot in slots
            if any(part.kind in (W, BW) for part in passes_in(slot.job))
        ]
        validated, known = known, max(gradients) + times.reduction
        checked = Check(0) in schedule.orders[0]
        for stage, row in enumerate(timeline.rows):
            assert [s.job for s in row] == [*schedule.orders[stage]]
            for slot in row:
                needs = [free[stage]]
                for part in passes_in(slot.job):
                    for value in reads(part, schedule.placement.n_chunks):
                        source = written[value]
                        delay = times.delay(value.chunk, part.chunk)
                        needs.append(source.end + delay)
                if isinstance(slot.job, Check):
                    needs.append(validated)
                elif isinstance(slot.job, Step) and not checked:
                    needs.append(known)
                if slot.start < max(needs) - 1e-9:
                    found.append((i, slot))
                free[stage] = slot.end
    return found
