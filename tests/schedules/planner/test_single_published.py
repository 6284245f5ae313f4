"""One chunk a stage, against what others have published: at least as good."""

import json
from pathlib import Path

import pytest

from zbpp.core import Costs, MemoryModel, lower_bound
from zbpp.schedules import plan_zb
from zbpp.simulator import bubble_rate, simulate, span

DATA = Path(__file__).parents[2] / "data"


@pytest.mark.parametrize(
    "row",
    [
        row
        for row in json.loads((DATA / "optimum_public.json").read_text())["rows"]
        if row["kind"] == "single"
    ],
    ids=lambda row: f"p{row['p']}-m{row['m']}-limit{row['mem_limit']:g}",
)
def test_proved_optima_are_met(row):
    schedule = plan_zb(
        n_stages=row["p"],
        n_microbatches=row["m"],
        memory=MemoryModel(m_w=row["costs"]["wfrac"], limit=row["mem_limit"]),
    )
    assert span(simulate(schedule)) == row["obj"]


@pytest.mark.parametrize("name", ["ZB-1p", "ZB-2p"])
@pytest.mark.parametrize(
    "row",
    json.loads((DATA / "paper_tables.json").read_text())["rows"],
    ids=lambda row: f"{row['model']}-m{row['m']}",
)
def test_the_papers_bubbles_are_met(row, name):
    costs = Costs(row["tf"], row["tb"], row["tw"], row["tcomm"])
    p = row["p"]
    memory = MemoryModel(1.0, row["m_w_over_m_b"], p if name == "ZB-1p" else 2 * p)
    schedule = plan_zb(
        n_stages=p, n_microbatches=row["m"], costs=costs, memory=memory, effort="fast"
    )
    assert bubble_rate(simulate(schedule, costs)) < row["bubble"][name] + 5e-5


@pytest.mark.parametrize(
    "row",
    [
        row
        for row in json.loads((DATA / "peers_public.json").read_text())["rows"]
        if "single" in row
    ],
    ids=lambda row: (
        f"p{row['p']}-m{row['m']}-{row['costs']['name']}-limit{row['limit']:g}"
    ),
)
def test_no_published_generator_is_better(row):
    times = row["costs"]
    costs = Costs(*(float(times[name]) for name in ("F", "B", "W", "comm")))
    memory = MemoryModel(1.0, times["wfrac"], row["limit"])
    p, m = row["p"], row["m"]
    schedule = plan_zb(
        n_stages=p, n_microbatches=m, costs=costs, memory=memory, effort="fast"
    )
    ours = bubble_rate(simulate(schedule, costs))
    peer = row["single"]["bubble"]
    assert ours <= peer + 1e-5  # five digits are given
    work = m * (times["F"] + times["B"] + times["W"])
    bound = lower_bound(schedule.placement, m, costs, memory)
    if work / (1 - peer) > 1.01 * bound:
        assert ours < peer - 1e-5
