"""The engine against hand-drawn pictures and the published bubble rates."""

import json
from pathlib import Path
from textwrap import dedent

import pytest

from zbpp.core import Costs, Placement, Schedule, draw, parse_job
from zbpp.planning import plan
from zbpp.simulator import bubble_rate, simulate

TABLES = Path(__file__).parents[1] / "data" / "paper_tables.json"
PAPER = json.loads(TABLES.read_text(encoding="utf-8"))["rows"]
COLUMNS = {"1F1B": "1F1B", "ZBH1": "ZB-H1", "ZBH2": "ZB-H2"}


def hand_made(*rows, placement=None, n_microbatches):
    orders = tuple(
        tuple(parse_job(cell, stage=stage) for cell in row.split())
        for stage, row in enumerate(rows)
    )
    placement = placement or Placement.single(len(rows))
    return Schedule("hand-made", placement, n_microbatches, orders)


TWO_STAGES = hand_made(
    "0F0 0F1 0B0 0W0 0B1 0W1 O",
    "1F0 1BW0 1F1 1BW1 O",
    n_microbatches=2,
)


def test_a_job_waits_for_its_stage_its_inputs_and_the_barrier():
    timeline = simulate(TWO_STAGES, Costs(optimizer=1))
    assert draw(timeline) == dedent("""\
        0 | F0  F1  .   .   B0  W0  .   B1  W1  O
        1 | .   F0  BW0 -   F1  BW1 -   .   .   O""")


def test_messages_delay_but_occupy_no_stage():
    timeline = simulate(TWO_STAGES, Costs(comm=1, optimizer=1))
    assert draw(timeline) == dedent("""\
        0 | F0  F1  .   .   .   .   B0  W0  .   B1  W1  O
        1 | .   .   F0  BW0 -   F1  BW1 -   .   .   .   O""")


def test_chunks_of_one_stage_exchange_nothing_and_share_its_time():
    one_stage = hand_made(
        "0F0 1F0 1B0 0B0 1W0 0W0", placement=Placement((0, 0)), n_microbatches=1
    )
    timeline = simulate(one_stage, Costs(f=2, b=4, w=(1, 3), comm=5))
    assert [slot.end for slot in timeline.rows[0]] == [1, 2, 4, 6, 9, 10]


@pytest.mark.parametrize("mode", COLUMNS)
@pytest.mark.parametrize("row", PAPER, ids=lambda row: f"{row['model']}-{row['m']}")
def test_published_bubble_rates_to_four_decimals(mode, row):
    costs = Costs(row["tf"], row["tb"], row["tw"], row["tcomm"])
    timeline = simulate(plan(mode, n_stages=row["p"], n_microbatches=row["m"]), costs)
    assert round(bubble_rate(timeline), 4) == row["bubble"][COLUMNS[mode]]


@pytest.mark.parametrize("row", PAPER[:3], ids=lambda row: f"m{row['m']}")
def test_published_bubble_rates_tell_wrong_models_apart(row):
    """Without the messages' delay, or with it on the stages, the figures differ."""
    schedule = plan("1F1B", n_stages=row["p"], n_microbatches=row["m"])
    f, b, w, comm = row["tf"], row["tb"], row["tw"], row["tcomm"]
    for wrong in (
        Costs(f, b, w),
        Costs(f + comm, b + comm, w),
        Costs(f, b, w, 2 * comm),
    ):
        rate = bubble_rate(simulate(schedule, wrong))
        assert round(rate, 4) != row["bubble"]["1F1B"]
