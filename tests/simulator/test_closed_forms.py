"""Idle time of the slowest stage: closed forms of arXiv 2401.10241 and 2405.15362.

p equal stages, no communication. Each form comes with the domain in which our
hand-made order meets it exactly, found on all p <= 6, m <= 20, F, B, W in 1, 2, 3, 5.

FThenB, 1F1B   everywhere
VPP            m >= p (2 chunks a stage), also where p does not divide m
ZB-H1          m >= p and W <= F: a fixed order only fits Ws that are short enough
ZB-H2          m >= 2p - 1 and W <= F
ZB-V           m >= 2p - 1 and F = B = W
"""

from itertools import product

import pytest

from zbpp.core import Costs
from zbpp.planning import plan
from zbpp.simulator import peak_memory, simulate, span

SIZES = [(p, m) for p in (1, 2, 3, 4, 6) for m in (1, 2, 5, 8, 11, 12)]
TIMES = [(1, 1, 1), (3, 3, 3), (3, 2, 1), (5, 1, 3), (1, 2, 3)]

IDLE = {
    "FThenB": lambda p, f, b, w: (p - 1) * (f + b + w),
    "1F1B": lambda p, f, b, w: (p - 1) * (f + b + w),
    "VPP": lambda p, f, b, w: (p - 1) * (f + b + w) / 2,
    "ZBH1": lambda p, f, b, w: (p - 1) * (f + b - w),
    "ZBH2": lambda p, f, b, w: max((p - 1) * (f + b - 2 * w), 0),
    "ZBV": lambda p, f, b, w: 0,
}
DOMAIN = {
    "FThenB": lambda p, m, f, b, w: True,
    "1F1B": lambda p, m, f, b, w: True,
    "VPP": lambda p, m, f, b, w: m >= p,
    "ZBH1": lambda p, m, f, b, w: m >= p and w <= f,
    "ZBH2": lambda p, m, f, b, w: m >= 2 * p - 1 and w <= f,
    "ZBV": lambda p, m, f, b, w: m >= 2 * p - 1 and f == b == w,
}
PEAK = {
    "FThenB": lambda p, m: m,
    "1F1B": lambda p, m: min(p, m),
    "VPP": lambda p, m: p + (p - 1) / 2,
    "ZBH1": lambda p, m: min(p, m),
    "ZBH2": lambda p, m: min(2 * p - 1, m),
    "ZBV": lambda p, m: p,
}


def meets_the_form(mode, p, m, times):
    timeline = simulate(plan(mode, n_stages=p, n_microbatches=m), Costs(*times))
    idle = span(timeline) - m * sum(times)
    return idle == pytest.approx(IDLE[mode](p, *times), abs=1e-9)


@pytest.mark.parametrize("mode", IDLE)
def test_idle_time_in_the_stated_domain(mode):
    cases = [
        (p, m, times)
        for (p, m), times in product(SIZES, TIMES)
        if DOMAIN[mode](p, m, *times)
    ]
    assert len(cases) >= 20
    assert [case for case in cases if not meets_the_form(mode, *case)] == []


@pytest.mark.parametrize(
    ("mode", "p", "m", "times"),
    [
        ("VPP", 4, 3, (1, 1, 1)),
        ("ZBH1", 4, 3, (1, 1, 1)),
        ("ZBH1", 4, 5, (1, 2, 3)),
        ("ZBH2", 4, 6, (1, 1, 1)),
        ("ZBH2", 3, 5, (1, 2, 3)),
        ("ZBV", 4, 6, (1, 1, 1)),
        ("ZBV", 4, 8, (3, 2, 1)),
    ],
)
def test_the_domains_are_not_wider(mode, p, m, times):
    assert not DOMAIN[mode](p, m, *times)
    assert not meets_the_form(mode, p, m, times)


@pytest.mark.parametrize("mode", PEAK)
def test_peak_memory_of_the_stage_that_holds_most(mode):
    for p, m in SIZES:
        if (mode in ("VPP", "ZBV") and m < 2 * p) or (mode == "VPP" and m % p):
            continue
        timeline = simulate(plan(mode, n_stages=p, n_microbatches=m))
        # With m_w = 0 a micro-batch counts until its B: the paper's table.
        peak = max(peak_memory(timeline, Costs(m_b=1, m_w=0)))
        assert peak == pytest.approx(PEAK[mode](p, m)), (p, m)
