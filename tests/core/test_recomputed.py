"""Costs of chunks, dealt to layers, and what a schedule recomputes of them."""

from dataclasses import fields, replace

import pytest

from zbpp.core import Costs, Placement, RequestError, Schedule, recomputed
from zbpp.core.costs import chunk_layers
from zbpp.schedules import plan_zb_v

COSTS = Costs(
    f=(1, 2, 3, 4), b=2.0, w=(1.0, 2.0), comm=0.3, optimizer=0.5, loss=0.25,
    reduction=0.1, validation=0.2,
    m_b=(1, 2, 3, 4), m_w=0.4, limit=50.0, m_fixed=1.0, peak_f=(2, 3, 4, 5),
    peak_b=0.5, peak_w=0.25, m_r=0.1,
)  # fmt: skip


@pytest.mark.parametrize("split", [None, (1, 2, 3, 1)])
def test_layers_give_the_chunks_again(split: tuple[int, ...] | None) -> None:
    placement = Placement.wave(2, 2)
    layers = chunk_layers(COSTS, placement, split)
    found = layers.on(placement, split or (1,) * 4).on(placement)
    for field in fields(found):
        if field.name not in ("placement", "splits", "peak_bw"):
            expected = pytest.approx(getattr(COSTS.on(placement), field.name))
            assert getattr(found, field.name) == expected, field.name


def schedule(**more: object) -> Schedule:
    return replace(plan_zb_v(n_stages=2, n_microbatches=4), **more)


def test_a_recomputed_chunk_takes_f_longer_in_b_and_leaves_m_r() -> None:
    again = schedule(recompute=(True, False, False, True))
    costs = recomputed(COSTS, again)
    assert costs.b == (2, 1, 1, 5)  # without the loss
    assert costs.m_b == (0.05, 2, 3, 0.05)
    held = costs.on(again.placement)
    assert held.peak_b[0] == pytest.approx(2 - 0.05)  # F's, on m_r
    plain = schedule()
    assert recomputed(COSTS, plain) == COSTS
    nothing = schedule(recompute=(False,) * 4)
    assert recomputed(COSTS, nothing) == COSTS


def test_a_part_of_a_chunk_is_a_share_of_its_layers() -> None:
    again = schedule(split=(2, 1, 1, 4), recompute=((0,), False, False, (0, 1, 2)))
    costs = recomputed(COSTS, again)
    assert costs.b == (1.5, 1, 1, 4)
    assert costs.m_b == pytest.approx((0.525, 2, 3, 1.0375))
    with pytest.raises(RequestError, match="does not say how many"):
        recomputed(COSTS, replace(again, split=None))


def test_a_limit_asks_for_m_r() -> None:
    again = schedule(recompute=(True,) * 4)
    with pytest.raises(RequestError, match="no m_r"):
        recomputed(replace(COSTS, m_r=None), again)
    free = replace(COSTS, m_r=None, limit=None)
    assert recomputed(free, again).m_b == (0, 0, 0, 0)


def test_a_stage_that_cannot_split_its_backward_is_refused() -> None:
    again = schedule(recompute=(True,) * 4)
    with pytest.raises(RequestError, match="stage 1 cannot split"):
        recomputed(replace(COSTS, splits=(True, False)), again)
