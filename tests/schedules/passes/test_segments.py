"""Plans with parts as programs: who computes next, with one F of a stage at a time."""

import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from textwrap import dedent

import pytest
from moe import moe_costs

from zbpp.core import (
    Check,
    Collective,
    Costs,
    Instruction,
    Part,
    Pass,
    PassKind,
    Receive,
    Schedule,
    Segment,
    Send,
    begun_by,
    ended_by,
    longest_span,
    passes_in,
    peaks,
    reads,
    replay,
    writes,
)
from zbpp.planning import plan
from zbpp.schedules import check_channels, lower, post_validated
from zbpp.schedules.passes.segments import in_segments

F, B, W, BW = PassKind


def lane_plan(
    mode: str,
    p: int,
    m: int,
    *,
    layers: int = 4,
    share: float = 0.4,
    effort: str = "default",
    **more: object,
) -> tuple[Schedule, Costs]:
    costs = moe_costs(share, layers, **more)
    made = plan(mode, n_stages=p, n_microbatches=m, costs=costs, effort=effort)
    return made, costs


def test_two_stages_as_drawn() -> None:
    """Of each stage its plan, and the segments; F's of a stage come one by one."""
    schedule, costs = lane_plan("ZBH1", 2, 2, layers=1, share=0.5)
    assert schedule.parts is not None
    rows = zip(schedule.parts, in_segments(schedule, costs).orders, strict=True)
    drawn = "\n".join(" ".join(map(str, each)) for row in rows for each in row)
    assert drawn + "\n" == dedent("""\
        0F0.0 0F0.1~ 0F1.0 0F1.1~ 0F0.2 0F0.3~ 0F1.2 0F1.3~ 0B0.0~ 0B0.1 0B0.2~ \
0W0.0 0B0.3 0B1.0~ 0W0.1 0B1.1 0B1.2~ 0W1.0 0B1.3 0W1.1 O
        0F0.0 0F0.2 0F0.3~ 0F1.0 0F1.2 0F1.3~ 0B0.0~ 0B0.1 0W0.0 0B0.3 0B1.0~ 0W0.1 \
0B1.1 0W1.0 0B1.3 0W1.1 O
        1F0.0 1F0.1~ 1F0.2 1F0.3~ 1B0.0~ 1F1.0 1F1.1~ 1B0.1 1B0.2~ 1F1.2 1F1.3~ \
1B0.3 1B1.0~ 1W0.0 1B1.1 1B1.2~ 1W0.1 1B1.3 1W1.0 1W1.1 O
        1F0.0 1F0.2 1F0.3~ 1B0.0~ 1F1.0 1B0.1 1F1.2 1B0.3 1F1.3~ 1B1.0~ 1W0.0 1B1.1 \
1W0.1 1B1.3 1W1.0 1W1.1 O
    """)


def run(orders: list[list[Instruction]], schedule: Schedule, costs: Costs) -> None:
    """Run orders one instruction after the other, as the runtime does, and look."""
    placement, n_chunks = schedule.placement, schedule.placement.n_chunks
    times = costs.on(placement)
    planned = peaks(schedule.rows_for(times), times)
    written: set[object] = set()
    columns = [0] * len(orders)
    ended: set[Pass] = set()
    is_open: list[set[Pass]] = [set() for _ in orders]
    held, most = [0.0] * len(orders), [0.0] * len(orders)
    before = None
    while columns != before:
        before = list(columns)
        for stage, order in enumerate(orders):
            for one in order[columns[stage] :]:
                begun, done = begun_by(one), ended_by(one)
                if begun and not written.issuperset(reads(begun, n_chunks)):
                    break
                if isinstance(one, Segment) and one.part.kind is W:
                    b = Pass(B, one.part.chunk, one.part.of.microbatch)
                    assert b in ended or b in is_open[stage]
                elif begun:
                    is_open[stage].add(begun)
                    if begun.kind is F:
                        held[stage] += times.m_b[begun.chunk]
                        most[stage] = max(most[stage], held[stage])
                kinds = Counter((x.kind is F, x.chunk) for x in is_open[stage])
                assert sum(n for (is_f, _), n in kinds.items() if is_f) <= 1
                assert max(kinds.values(), default=0) <= 1
                if isinstance(one, Check):
                    assert not is_open[stage]
                if done:
                    written.update(writes(done, n_chunks))
                    ended.add(done)
                    is_open[stage].discard(done)
                    m_b, m_w = times.m_b[done.chunk], times.m_w[done.chunk]
                    held[stage] += {F: 0.0, B: m_w - m_b, W: -m_w, BW: -m_b}[done.kind]
                columns[stage] += 1
    assert columns == [len(order) for order in orders]
    due = {x for order in schedule.orders for job in order for x in passes_in(job)}
    assert ended == due
    assert all(a <= b + 1e-9 for a, b in zip(most, planned, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_orders_end_with_no_more_memory_than_planned(seed: int) -> None:
    draw = random.Random(seed)
    mode = draw.choice(("ZBH1", "ZB", "ZBV", "ZBVPP", "DualPipeV"))
    p, m = draw.randint(1, 4), draw.randint(1, 8)
    more = {"comm": draw.choice((0.0, 0.3))}
    if mode == "ZBVPP":
        more["memory_limit"] = draw.choice((p, 1.5 * p))
    share = draw.choice((0.1, 0.4, 0.6))
    schedule, costs = lane_plan(mode, p, m, share=share, effort="fast", **more)
    for each in (schedule, post_validated(schedule)):
        run([list(x) for x in in_segments(each, costs).orders], each, costs)
        lower(each, costs=costs, overlaps=True)  # has checked its channels
        lower(each, costs=costs, overlaps=True, on_device=True)
        lower(each, overlaps=True)  # without costs


def test_what_is_looked_at_can_fail() -> None:
    """The control: rows of a plan as they are have two F's at once."""
    schedule, costs = lane_plan("ZBH1", 2, 2, layers=1, share=0.5)
    assert schedule.parts is not None
    left = Counter(x.of for row in schedule.parts for x in row if isinstance(x, Part))
    rows: list[list[Instruction]] = []
    for row in schedule.parts:
        rows.append([])
        for part in row:
            if isinstance(part, Part):
                left[part.of] -= 1
                begins = not left[part.of] if part.kind is W else not part.index
                rows[-1].append(Segment(part, begins, left[part.of]))
    with pytest.raises(AssertionError):
        run(rows, schedule, costs)


FIGURES = re.findall(
    r"`(\w+)`, (\d+) stages, (\d+) micro-batches(?:, limit (\d+))? "
    r"\| ([\d.]+) \| ([\d.]+) \|",
    (Path(__file__).parents[3] / "docs/how_to/overlap.md").read_text("utf-8"),
)
"""Mode, stages, micro-batches, limit; spans as run and planned, of those in a row."""


@pytest.mark.slow
@pytest.mark.parametrize("row", FIGURES, ids=" ".join)
def test_the_figures_of_the_docs(row: tuple[str, ...]) -> None:
    mode, p, m, limit, as_run, as_planned = row
    more = {"memory_limit": float(limit)} if limit else {}
    schedule, costs = lane_plan(mode, int(p), int(m), **more)
    times = costs.on(schedule.placement)
    planned, in_a_row = (
        longest_span(replay(rows, times, n_microbatches=int(m)))
        for rows in (schedule.rows_for(times), schedule.orders)
    )
    cut = in_segments(schedule, costs)
    runs = zip(cut.starts, cut.ends, strict=True)
    took = max(ends[-1] - starts[0] for starts, ends in runs)
    assert f"{took / in_a_row:.2f} {planned / in_a_row:.2f}" == f"{as_run} {as_planned}"
    for starts, ends in zip(cut.starts, cut.ends, strict=True):
        assert all(a <= b for a, b in zip(starts, ends, strict=True))
        assert all(a <= b for a, b in pairwise(starts))


def test_the_docs_have_figures() -> None:
    assert len(FIGURES) > 3


def test_replicas_add_up_behind_the_last_w() -> None:
    schedule, costs = lane_plan("ZBV", 2, 4)
    for order in in_segments(schedule, costs, adds_up=True).orders:
        for one in [x for x in order if isinstance(x, Collective)]:
            where = [c for c, x in enumerate(order) if ended_by(x) is not None]
            weights = [
                c for c in where if (w := ended_by(order[c])) and w.kind is W
                and w.chunk == one.chunk
            ]  # fmt: skip
            assert order.index(one) > max(weights)
        names = [str(x) for x in order if isinstance(x, Collective)]
        chunks = sorted({str(x.part.chunk) for x in order if isinstance(x, Segment)})
        assert sorted(names) == sorted(
            f"{c}{kind}" for c in chunks for kind in ("REDUCE_GRAD", "REDUCE_WAIT")
        )


def test_a_send_before_its_last_segment_is_caught() -> None:
    """The control: both ends of the channels are checked for segments too."""
    schedule, costs = lane_plan("ZBH1", 2, 2, layers=1)
    first, last = lower(schedule, costs=costs, overlaps=True)
    moved = list(first)
    at = next(c for c, x in enumerate(moved) if isinstance(x, Send))
    moved[at - 1 : at + 1] = moved[at], moved[at - 1]
    with pytest.raises(AssertionError, match="too early"):
        check_channels([tuple(moved), last], schedule.placement)
    without = tuple(x for x in last if not isinstance(x, Receive))
    with pytest.raises(AssertionError, match="lacks"):
        check_channels([first, without], schedule.placement)


def test_a_plan_without_parts_has_no_segments() -> None:
    schedule = plan("ZBH1", n_stages=2, n_microbatches=2)
    assert lower(schedule, overlaps=True) == lower(schedule)
