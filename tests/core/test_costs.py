import math

import pytest

from zbpp.core import (
    Check,
    Costs,
    Pass,
    PassKind,
    Placement,
    RequestError,
    Step,
)

F, B, W, BW = PassKind
V = Placement.wave(2)  # 0 1 1 0


def test_a_number_is_split_over_the_chunks_of_a_stage():
    times = Costs(f=4.0, b=6.0, w=2.0, optimizer=8.0).on(V)
    assert times.f == (2.0,) * 4
    assert [times.of(Pass(kind, 2, 0)) for kind in (F, B, W, BW)] == [2, 3, 1, 4]
    assert [times.of(Step(stage)) for stage in (0, 1)] == [8.0, 8.0]
    assert times.of(Check(0)) == 0.0


def test_uneven_stages_split_their_own_value():
    assert Costs(f=6.0).on(Placement((0, 0, 0, 1))).f == (2.0, 2.0, 2.0, 6.0)


def test_a_list_has_one_value_per_chunk():
    times = Costs(f=(1.0, 2.0, 3.0, 4.0), optimizer=(1.0, 2.0, 4.0, 8.0)).on(V)
    assert times.f == (1.0, 2.0, 3.0, 4.0)
    assert times.optimizer == (9.0, 6.0)  # chunks 0 and 3, chunks 1 and 2


def test_a_message_takes_time_only_between_stages():
    times = Costs(comm=0.5).on(V)
    assert [times.delay(c, c + 1) for c in range(3)] == [0.5, 0.0, 0.5]


def test_joint_backward_takes_the_time_of_both():
    times = Costs(b=(1.0, 2.0), w=(4.0, 8.0)).on(Placement.single(2))
    assert times.of_pass(BW, 1) == times.of_pass(B, 1) + times.of_pass(W, 1) == 10.0


def test_the_loss_is_a_part_of_the_last_chunks_forward():
    assert Costs(f=2.0, loss=0.5).on(V).f == (1.0, 1.0, 1.0, 1.5)
    assert Costs(f=(1.0, 2.0), loss=0.5).on(Placement.single(2)).f == (1.0, 2.5)
    assert Costs(f=2.0).on(V).f == (1.0,) * 4


def test_a_backward_that_cannot_be_split_is_one_b_of_both_times():
    times = Costs(b=4.0, w=2.0, m_b=2.0, m_w=1.0, splits=(True, False)).on(V)
    assert times.b == (2.0, 3.0, 3.0, 2.0) and times.w == (1.0, 0.0, 0.0, 1.0)
    assert [times.of_pass(BW, chunk) for chunk in range(4)] == [3.0] * 4
    assert times.joined().m_w == (0.5, 0.0, 0.0, 0.5)
    assert times.m_w == (0.5,) * 4  # what a real order keeps


def test_wrong_splits_are_refused():
    with pytest.raises(RequestError, match="splits has 3 entries for 2 stages"):
        Costs(splits=(True, True, False)).on(V)
    with pytest.raises(RequestError, match=r"splits\[1\] is 0; write true or false"):
        Costs(splits=(True, 0))


@pytest.mark.parametrize(
    "name", ["f", "b", "w", "comm", "optimizer", "loss", "reduction", "validation"]
)
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_times_are_finite_and_not_negative(name, value):
    with pytest.raises(RequestError, match=f"^{name} is {value}; it must be finite"):
        Costs(**{name: value})
    if name != "loss":
        with pytest.raises(RequestError, match=f"^{name} is"):
            Costs(**{name: (1.0, value)})


@pytest.mark.parametrize("name", ["m_b", "m_w", "memory_limit"])
def test_memories_are_finite_and_not_negative(name):
    field = name.removeprefix("memory_")
    with pytest.raises(RequestError, match=f"^{name} is -1"):
        Costs(**{field: -1.0})


def test_a_list_of_one_entry_a_stage_is_dealt_evenly_to_the_chunks_of_the_stage():
    """Stage 0 holds chunks 0 and 3, stage 1 holds 1 and 2."""
    times = Costs(f=(1.0, 3.0), w=(1.0, 2.0, 3.0, 4.0), optimizer=(5.0, 7.0)).on(V)
    assert times.f == (0.5, 1.5, 1.5, 0.5)
    assert times.w == (1.0, 2.0, 3.0, 4.0)
    assert times.optimizer == (5.0, 7.0)
    held = Costs(m_b=(2.0, 4.0), m_w=1.0, limit=(3.0, 5.0)).on(V)
    assert (held.m_b, held.m_w) == ((1.0, 2.0, 2.0, 1.0), (0.5,) * 4)
    swapped = Placement((1, 0))  # as many stages as chunks: entries are chunks
    assert Costs(f=(1.0, 3.0)).on(swapped).f == (1.0, 3.0)


def test_a_list_of_another_length_is_refused_with_both_numbers():
    with pytest.raises(RequestError, match="b has 3 entries for 4 chunks"):
        Costs(b=(1.0, 1.0, 1.0)).on(V)
    with pytest.raises(RequestError, match="m_b has 1 entries for 4 chunks"):
        Costs(m_b=(1.0,)).on(V)
    with pytest.raises(RequestError, match="memory_limit has 4 entries for 2 stages"):
        Costs(limit=(1.0,) * 4).on(V)
    assert Costs(limit=(1.0, 2.0)).on(V).limit == (1.0, 2.0)


def test_b_may_leave_more_than_f_as_checkpoints_do():
    held = Costs(m_b=(3.0, 2.0), m_w=3.0).on(Placement.single(2))
    assert held.peak_b == (0.0, 1.0)
    assert held.peak_bw == (0.0, 1.0)


def test_a_peak_below_what_its_pass_leaves_is_refused():
    with pytest.raises(RequestError, match=r"chunk 1: peak_f 2 is below .* 3; give"):
        Costs(m_b=3.0, peak_f=(4.0, 2.0)).on(Placement.single(2))
