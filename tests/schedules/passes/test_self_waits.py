"""No job that waits for its device may wait for itself: receives are posted for it."""

from itertools import product
from textwrap import dedent

import pytest
from program_text import short
from trained_modes import MODES

from zbpp.core import (
    Costs,
    Pass,
    PassKind,
    Placement,
    Program,
    Receive,
    Reduce,
    RequestError,
    Schedule,
    Send,
    Value,
    What,
    reads,
)
from zbpp.planning import plan
from zbpp.schedules import (
    add_collectives,
    lower,
    lower_forward,
    post_validated,
)
from zbpp.schedules.passes.lower import ends_on_device

ALL = (*MODES, "ZB", "ZBVPP", "VHalf", "VMin")
COSTS = (Costs(), Costs(1, 1.3, 0.6, comm=0.4), Costs(2, 0, 0), Costs(comm=3))


def drawn(programs: tuple[Program, ...]) -> str:
    return "\n".join(map(short, programs))


def test_two_stages_that_stop_each_other() -> None:
    """Stage 0 in F1 waits for BW0, and stage 1 in BW0 for F1."""
    programs = lower(plan("1F1B", n_stages=2, n_microbatches=2), ahead=1)
    assert drawn(programs) == dedent("""\
        F0> +B0 F1> +B1 BW0 BW1 O
        +F0 F0 +F1 BW0> F1 BW1> O""")
    assert not ends_on_device(programs)


def test_a_receive_is_posted_in_the_job_in_which_its_sender_ends() -> None:
    """B0 is sent when stage 0 has ended F1: it is posted behind it, not before."""
    programs = lower(plan("1F1B", n_stages=2, n_microbatches=3), on_device=True)
    assert drawn(programs) == dedent("""\
        F0> F1> +B0 BW0 +B1 F2> BW1 +B2 BW2 O
        +F0 +F1 F0 BW0> F1 BW1> +F2 F2 BW2> O""")
    assert ends_on_device(programs)


def test_a_stage_that_waits_for_itself_alone() -> None:
    """Its own F1 has to end before stage 1 begins B0."""
    a0, a1 = (Value(What.ACTIVATION, 0, i) for i in range(2))
    g0 = Value(What.GRADIENT, 1, 0)
    f, b = PassKind.F, PassKind.B
    first = (
        Pass(f, 0, 0),
        Send(a0, 1),
        Receive(g0, 1),
        Pass(f, 0, 1),
        Send(a1, 1),
        Pass(b, 0, 0),
    )
    second = (
        Receive(a0, 0),
        Pass(f, 1, 0),
        Receive(a1, 0),
        Pass(f, 1, 1),
        Pass(b, 1, 0),
        Send(g0, 0),
    )
    assert not ends_on_device([first, second])
    late = (*first[:2], *first[3:5], first[2], first[5])
    assert ends_on_device([late, second])


def test_a_sum_that_begins_before_what_another_stage_needs() -> None:
    """Stage 0 in F0 waits for stage 1 to begin it, which is to have F0's value."""
    value, f = Value(What.ACTIVATION, 0, 0), PassKind.F
    first = (Reduce(0), Pass(f, 0, 0), Send(value, 1))
    second = (Receive(value, 0), Pass(f, 1, 0), Reduce(1))
    assert not ends_on_device([first, second])
    assert ends_on_device([(*first[1:], first[0]), second])


def test_sends_wait_too_where_receives_are_posted_late() -> None:
    """So no depth alone is right: 0 and 2 are not here, 1 is."""
    schedule = plan("ZBH2", n_stages=2, n_microbatches=4)
    ends = [ends_on_device(lower(schedule, ahead=n)) for n in range(3)]
    assert ends == [False, True, False]


def check(mode: str, n_stages: int, n_microbatches: int) -> int:
    """Check a mode's programs; return how many there were."""
    try:
        schedule = plan(
            mode, n_stages=n_stages, n_microbatches=n_microbatches, effort="fast"
        )
    except RequestError:
        return 0
    schedules = [schedule, post_validated(schedule)]
    for one, costs in product(schedules, COSTS):
        programs = lower(one, costs=costs, on_device=True)
        assert ends_on_device(programs)
        if costs == Costs():
            # VPP's values come long before they are read; what waits in a buffer here
            # waits with its sender where receives are posted two jobs ahead
            more = max_posted(programs, one) - max_posted(lower(one), one)
            assert more <= (n_stages - 1 if mode == "VPP" else 1)
    return len(schedules) * len(COSTS)


def max_posted(programs: tuple[Program, ...], schedule: Schedule) -> int:
    most = 0
    for program in programs:
        posted: set[object] = set()
        for i in program:
            if isinstance(i, Receive):
                posted.add(i.value)
            elif isinstance(i, Pass):
                posted.difference_update(reads(i, schedule.placement.n_chunks))
            most = max(most, len(posted))
    return most


@pytest.mark.parametrize("mode", ALL)
def test_no_stage_waits_for_itself(mode: str) -> None:
    """The `nightly` test below goes through more sizes."""
    assert sum(check(mode, p, m) for p, m in ((2, 3), (3, 7), (4, 8))) >= 8


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("mode", ALL)
def test_no_stage_waits_for_itself_at_any_size(mode: str) -> None:
    sizes = [(p, m) for p in (2, 3, 5, 8) for m in (1, p - 1, p, 2 * p, 3 * p + 1)]
    assert sum(check(mode, p, m) for p, m in sizes) > 0


@pytest.mark.parametrize("mode", MODES)
def test_nor_with_collectives_and_tied_parameters(mode: str) -> None:
    plain = plan(mode, n_stages=3, n_microbatches=6)
    last = plain.placement.n_chunks - 1
    for one in (plain, post_validated(plain)):
        for shards in (False, True):
            schedule = add_collectives(one, shards=shards)
            lower(schedule, ties=[(0, last), (0, 1, last)], on_device=True)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_nor_in_an_evaluation(p: int) -> None:
    wave, rounds = Placement.wave(p), Placement.interleaved(p, 2)
    for placement in (Placement.single(p), wave, rounds):
        assert ends_on_device(lower_forward(placement, n_microbatches=2 * p))


def test_on_the_host_receives_are_posted_two_delays_earlier() -> None:
    """Word of a receive travels as long as the value: 4 jobs before 2 before F3."""
    schedule = plan("FThenB", n_stages=2, n_microbatches=8)
    near, far = (
        drawn(lower(schedule, costs=Costs(comm=comm))).splitlines()[1]
        for comm in (0.0, 2.0)
    )
    start = "+F0 +F1 +F2 F0 +F3 F1 +F4 F2 +F5 F3 +F6 F4 +F7 F5 F6 F7 BW0> BW1>"
    assert near.startswith(start)
    assert far.startswith(
        "+F0 +F1 +F2 +F3 +F4 +F5 +F6 F0 +F7 F1 F2 F3 F4 F5 F6 F7 BW0>"
    )
