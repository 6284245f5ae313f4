"""Programs: both ends of each channel agree, receives are early, no stage stops itself.

In pictures ``+F0`` posts a receive, ``F0>`` sends, plain jobs are jobs.
"""

import random
from collections import Counter
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe import moe_costs
from programs import channels, ends_agree, ends_where_all_wait

from zbpp.core import (
    AddTied,
    Check,
    Collective,
    Costs,
    Lane,
    Parts,
    Pass,
    PassKind,
    Program,
    Receive,
    RequestError,
    Schedule,
    Segment,
    Send,
    Step,
    TiedGradient,
    What,
    at_check,
    begun_by,
    ended_by,
    input_of,
    passes_in,
    peaks,
    reads,
    writes,
)
from zbpp.planning import plan
from zbpp.schedules import (
    add_collectives,
    lower,
    lower_forward,
    post_validated,
)
from zbpp.simulator import simulate, span

F, B, W, BW = PassKind
MODES = ("FThenB", "1F1B", "VPP", "ZBH1", "ZBH2", "ZB", "ZBV", "ZBVPP", "VHalf", "VMin")
COSTS = (None, Costs(1, 1.3, 0.6, comm=0.4), Costs(2, 0, 0), Costs(comm=3))


def drawn(programs: tuple[Program, ...]) -> str:
    return "\n".join(map(short, programs))


def short(program: Program) -> str:
    words: list[str] = []
    for instruction in program:
        match instruction:
            case Receive(value):
                kind = "F" if value.what is What.ACTIVATION else "B"
                words.append(f"+{kind}{value.microbatch}")
            case Send():
                words[-1] += ">"
            case Pass(kind, _, microbatch):
                words.append(f"{kind}{microbatch}")
            case Step():
                words.append("O")
            case Check():
                words.append("V")
    return " ".join(words)


@pytest.mark.parametrize(
    ("mode", "m", "options", "picture"),
    [
        (
            "1F1B",
            3,
            {"ahead": 1},
            """\
            F0> +B0 F1> BW0 +B1 F2> +B2 BW1 BW2 O
            +F0 F0 +F1 BW0> F1 +F2 BW1> F2 BW2> O""",
        ),
        (
            "ZBH1 V",
            3,
            {},
            """\
            F0> F1> V +B0 B0 +B1 W0 F2> +B2 B1 W1 B2 W2 O
            +F0 F0 +F1 V B0> F1 +F2 B1> W0 F2 B2> W1 W2 O""",
        ),
        # B0 is sent when stage 0 has ended F1: it is posted behind it, not before.
        (
            "1F1B",
            3,
            {"on_device": True},
            """\
            F0> F1> +B0 BW0 +B1 F2> BW1 +B2 BW2 O
            +F0 +F1 F0 BW0> F1 BW1> +F2 F2 BW2> O""",
        ),
    ],
)
def test_programs_are_as_drawn(mode, m, options, picture):
    schedule = plan(mode.removesuffix(" V"), n_stages=2, n_microbatches=m)
    schedule = post_validated(schedule) if mode.endswith(" V") else schedule
    assert drawn(lower(schedule, **options)) == dedent(picture)


def test_on_slow_links_receives_are_posted_two_delays_earlier():
    """Word of a receive travels as long as the value: 4 jobs before 2 before F3."""
    schedule = plan("FThenB", n_stages=2, n_microbatches=8)
    near, far = (
        drawn(lower(schedule, costs=Costs(comm=comm))).splitlines()[1]
        for comm in (0.0, 2.0)
    )
    assert near.startswith("+F0 +F1 +F2 F0 +F3 F1 +F4 F2 +F5 F3 +F6 F4 +F7 F5 F6 F7 B")
    assert far.startswith("+F0 +F1 +F2 +F3 +F4 +F5 +F6 F0 +F7 F1 F2 F3 F4 F5 F6 F7 B")


# --- the law --------------------------------------------------------------------------


def max_posted(programs: tuple[Program, ...], n_chunks: int) -> int:
    """Run through each program: what is read is posted; count open receives."""
    most = 0
    for program in programs:
        posted: set = set()
        written: set = set()
        for i in program:
            if isinstance(i, Receive):
                posted.add(i.value)
            elif isinstance(i, Send):
                assert isinstance(i.value, TiedGradient) or i.value in written, i
            elif isinstance(i, Pass):
                assert posted | written >= set(reads(i, n_chunks)), i
                posted.difference_update(reads(i, n_chunks))
                written.update(writes(i, n_chunks))
            most = max(most, len(posted))
        assert all(isinstance(value, TiedGradient) for value in posted)
    return most


def check(mode: str, p: int, m: int, ahead: int, costs: Costs | None) -> None:
    try:
        plain = plan(mode, n_stages=p, n_microbatches=m, effort="fast")
    except RequestError:  # a VPP of few micro-batches
        return
    n = plain.placement.n_chunks
    ties = [(0, n - 1), (0, *range(1, min(n - 1, 2)), n - 1)] if n > 1 else []
    for one in (plain, post_validated(plain)):
        programs = lower(one, ahead=ahead, costs=costs)
        if costs is None:
            # one buffer a job ahead, and what a channel's order forces to come earlier
            assert max_posted(programs, n) <= ahead + 1 + 2 * p
        on_device = lower(one, costs=costs, on_device=True)
        max_posted(on_device, n)
        variants = [programs, on_device]
        for shards in (False, True):
            summed = add_collectives(one, shards=shards)
            variants.append(lower(summed, ties=ties, on_device=True))
        assert all(map(ends_agree, variants))
        assert all(map(ends_where_all_wait, variants[1:]))


@given(
    mode=st.sampled_from(MODES),
    p=st.integers(1, 5),
    m=st.integers(1, 10),
    ahead=st.integers(0, 4),
    costs=st.sampled_from(COSTS),
)
def test_ends_agree_and_no_stage_waits_for_itself(mode, p, m, ahead, costs):
    check(mode, p, m, ahead, costs)


def test_receives_posted_too_early_or_late_deadlock():
    """Control: no depth alone is right; 0 and 2 are not here, 1 is."""
    schedule = plan("ZBH2", n_stages=2, n_microbatches=4)
    ends = [ends_where_all_wait(lower(schedule, ahead=n)) for n in range(3)]
    assert ends == [False, True, False]


@pytest.mark.parametrize("mode", ["ZBH1", "ZBV", "VPP"])
def test_programs_of_an_evaluation_pass_all_chunks(mode):
    placement = plan(mode, n_stages=3, n_microbatches=1).placement
    for m in (1, 2, 6):
        programs = lower_forward(placement, n_microbatches=m)
        passes = [i for program in programs for i in program if isinstance(i, Pass)]
        assert len(set(passes)) == len(passes) == placement.n_chunks * m
        assert ends_where_all_wait(programs)
        assert channels(list(programs), Send) == channels(list(programs), Receive)


def move(programs: tuple, stage: int, what: type, to: int, which: int = 0) -> list:
    """Move an instruction of a kind to another place of its program."""
    row = list(programs[stage])
    at = [k for k, x in enumerate(row) if isinstance(x, what)][which]
    row.insert(at + to, row.pop(at))
    return [tuple(row) if k == stage else x for k, x in enumerate(programs)]


def test_the_program_checker_finds_wrong_programs():
    """Control of the law."""
    schedule = plan("ZBH1", n_stages=2, n_microbatches=3)
    programs, checked = lower(schedule), lower(post_validated(schedule))
    late = sum(isinstance(i, Receive) for i in at_check(checked[1])[0])
    assert ends_agree(programs) and ends_agree(checked)
    assert not ends_agree(move(programs, 1, Receive, -1, which=1))  # swapped
    assert not ends_agree(move(checked, 1, Receive, -4, which=late))  # to before V
    early = move(programs, 0, Send, -1)
    lacking = [programs[0], tuple(i for i in programs[1] if not isinstance(i, Receive))]
    for wrong in (early, lacking):
        with pytest.raises(AssertionError):
            max_posted(wrong, 2)


def test_a_schedule_without_steps_steps_at_its_end():
    full = plan("ZBH1", n_stages=2, n_microbatches=2)
    bare = Schedule("bare", full.placement, 2, tuple(o[:-1] for o in full.orders))
    assert lower(bare) == lower(full)


# --- tied parameters ------------------------------------------------------------------


def exchanged(program: Program, kind: type) -> set[tuple[str, int]]:
    return {
        (str(i.value), i.peer)
        for i in program
        if isinstance(i, kind) and isinstance(i.value, TiedGradient)
    }


def test_gradients_of_tied_parameters_are_messages_behind_the_last_w():
    first, last = lower(plan("ZBH1", n_stages=2, n_microbatches=2), ties=[(0, 1)])
    assert [str(i) for i in first[-7:]] == [
        "receive gradient of tie 0 in chunk 1 from stage 1",
        "0B1",
        "0W1",
        "send gradient of tie 0 in chunk 0 to stage 1",
        "add the gradients of tied parameters",
        "reduce the gradient norm over all stages",
        "O",
    ]
    assert exchanged(last, Send) == {("gradient of tie 0 in chunk 1", 0)}
    summed = add_collectives(plan("ZBH1", n_stages=2, n_microbatches=2), shards=False)
    program = lower(summed, ties=[(0, 1)])[0]
    tied = [isinstance(i, Send) and isinstance(i.value, TiedGradient) for i in program]
    assert str(program[tied.index(True) - 1]) == "0REDUCE_WAIT"


def test_a_tie_within_one_stage_sends_no_messages():
    schedule = plan("ZBV", n_stages=2, n_microbatches=4)
    first, last = lower(schedule, ties=[(0, 3)])
    assert not exchanged(first, Send) and not exchanged(last, Send)
    assert AddTied(0) in first and AddTied(1) not in last
    first, last = lower(schedule, ties=[(0, 1, 3), (1, 2)])
    names = {(f"gradient of tie 0 in chunk {c}", 1) for c in (0, 3)}
    assert exchanged(first, Send) == names
    assert exchanged(first, Receive) == {("gradient of tie 0 in chunk 1", 1)}


# --- plans in parts: segments ---------------------------------------------------------


def test_two_stages_in_segments_are_as_drawn():
    """F's of a stage come one by one; the second begins when the first ends."""
    costs = moe_costs(0.5, 1)
    schedule = plan("ZBH1", n_stages=2, n_microbatches=2, costs=costs)
    programs = lower(schedule, costs=costs, overlaps=True)
    rows = [
        " ".join(str(i) for i in program if isinstance(i, Segment | Step))
        for program in programs
    ]
    assert rows == [
        "0F0.0 0F0.2 0F0.3~ 0F1.0 0F1.2 0F1.3~ 0B0.0~ 0B0.1 0W0.0 0B0.3 0B1.0~ 0W0.1 "
        "0B1.1 0W1.0 0B1.3 0W1.1 O",
        "1F0.0 1F0.2 1F0.3~ 1B0.0~ 1F1.0 1B0.1 1F1.2 1B0.3 1F1.3~ 1B1.0~ 1W0.0 1B1.1 "
        "1W0.1 1B1.3 1W1.0 1W1.1 O",
    ]


def run(programs: tuple[Program, ...], schedule: Schedule, costs: Costs) -> None:
    """Run programs one instruction after the other, as the runtime does.

    One F of a stage and one backward of a chunk is open at a time, none at a V, every
    pass ends, and no stage holds more than planned.
    """
    placement, n_chunks = schedule.placement, schedule.placement.n_chunks
    times = costs.on(placement)
    planned = peaks(schedule.rows_for(times), times)
    written: set = set()
    ended: set[Pass] = set()
    passes = {x for o in schedule.orders for job in o for x in passes_in(job)}
    columns = [0] * len(programs)
    is_open: list[set[Pass]] = [set() for _ in programs]
    held, most = [0.0] * len(programs), [0.0] * len(programs)
    before = None
    while columns != before:
        before = list(columns)
        for stage, program in enumerate(programs):
            for one in program[columns[stage] :]:
                begun = begun_by(one)
                if not written.issuperset(v for x in begun for v in reads(x, n_chunks)):
                    break
                if isinstance(one, Segment) and one.part.kind is W:
                    b = Pass(B, one.part.chunk, one.part.of.microbatch)
                    assert b in ended or b in is_open[stage]
                    begun = ()
                for each in begun:
                    is_open[stage].add(each)
                    if each.kind is F:
                        held[stage] += times.m_b[each.chunk]
                        most[stage] = max(most[stage], held[stage])
                kinds = Counter((x.kind is F, x.chunk) for x in is_open[stage])
                assert sum(n for (is_f, _), n in kinds.items() if is_f) <= 1
                assert max(kinds.values(), default=0) <= 1
                assert not (isinstance(one, Check) and is_open[stage])
                if isinstance(one, Collective):  # a sum of replicas
                    assert ended >= {x for x in passes if x.chunk == one.chunk}
                for done in ended_by(one):
                    written.update(writes(done, n_chunks))
                    ended.add(done)
                    is_open[stage].discard(done)
                    m_b, m_w = times.m_b[done.chunk], times.m_w[done.chunk]
                    held[stage] += {F: 0.0, B: m_w - m_b, W: -m_w, BW: -m_b}[done.kind]
                columns[stage] += 1
    assert columns == [len(program) for program in programs]
    assert ended == passes
    assert all(a <= b + 1e-9 for a, b in zip(most, planned, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_segments_end_with_no_more_memory_than_planned(seed):
    rng = random.Random(seed)
    mode = rng.choice(("ZBH1", "ZB", "ZBV", "ZBVPP", "DualPipeV"))
    p, m = rng.randint(1, 4), rng.randint(1, 6)
    costs = moe_costs(rng.choice((0.1, 0.4, 0.6)), comm=rng.choice((0.0, 0.3)))
    schedule = plan(mode, n_stages=p, n_microbatches=m, costs=costs, effort="fast")
    if schedule.parts is None:  # whole passes are as good
        return
    for each in (schedule, post_validated(schedule)):
        for options in ({}, {"on_device": True}, {"adds_up": True}):
            programs = lower(each, costs=costs, overlaps=True, **options)
            run(programs, each, costs)
            sums = [str(x) for x in sum(programs, ()) if isinstance(x, Collective)]
            kinds = ("REDUCE_GRAD", "REDUCE_WAIT") if "adds_up" in options else ()
            chunks = range(each.placement.n_chunks)
            assert sorted(sums) == sorted(f"{c}{k}" for c in chunks for k in kinds)
        lower(each, overlaps=True)  # without costs


def test_a_joint_backward_whose_weight_part_communicates_ends_in_one_segment():
    exchange = ((Lane.NETWORK, 0.745),)
    free = ((Lane.NETWORK, 0.0),)
    costs = Costs(parts=Parts(free, free, exchange, layers=2))
    made = plan("ZBV", n_stages=2, n_microbatches=1, costs=costs)
    # two chunks a stage, and nothing else takes time
    assert span(simulate(made, costs)) == pytest.approx(2 * 0.745)


def test_a_plan_without_parts_has_no_segments():
    schedule = plan("ZBH1", n_stages=2, n_microbatches=2)
    assert lower(schedule, overlaps=True) == lower(schedule)


@pytest.mark.parametrize("mode", ["DualPipeV", "Combined1F1B", "ZBV"])
def test_every_value_of_another_stage_is_received_before_its_pass(mode):
    """Both passes of a pair begin with it; what they write is sent behind it."""
    schedule = plan(mode, n_stages=3, n_microbatches=8)
    stage_of = schedule.placement.stage_of
    for options in ({"overlaps": True}, {"overlaps": True, "on_device": True}, {}):
        programs = lower(schedule, **options)
        received, needed = [0] * 3, [0] * 3
        for stage, program in enumerate(programs):
            there = set()
            for job in program:
                if isinstance(job, Receive):
                    there.add(job.value)
                    received[stage] += 1
                for done in () if isinstance(job, Receive | Send) else passes_in(job):
                    value = input_of(done, len(stage_of))
                    if value is not None and stage_of[value.chunk] != stage:
                        assert value in there, f"{job} of stage {stage}"
                        needed[stage] += 1
        assert received == needed
        assert sum(isinstance(x, Send) for x in sum(programs, ())) == sum(received) > 0
