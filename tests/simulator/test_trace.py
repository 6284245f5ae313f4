"""Chrome traces: names, counters, arrows, and files that are read back.

That every job stands in a trace, `test_media.py` tests.
"""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from zbpp.core import (
    Costs,
    PassKind,
    RequestError,
    parse_job,
)
from zbpp.planning import plan
from zbpp.simulator import (
    join,
    messages,
    peak_memory,
    read_trace,
    simulate,
    simulate_iterations,
    trace_events,
    write_trace,
)

COSTS = Costs(18.522, 18.086, 9.337, 0.601, 3.3)


def timeline_of(mode, p=4, m=6):
    return simulate(plan(mode, n_stages=p, n_microbatches=m), COSTS)


def test_a_file_holds_every_job_name_and_memory_of_each_run(tmp_path):
    timelines = [timeline_of("1F1B"), timeline_of("ZBV")]
    write_trace(timelines, tmp_path / "t.json", costs=Costs())
    data = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    events = data["traceEvents"]
    assert {event["ph"] for event in events} == {"X", "C", "M", "s", "f"}
    for run, timeline in enumerate(timelines):
        mine = [event for event in events if event["pid"] == run]
        names = [event["args"] for event in mine if event["name"] == "thread_name"]
        assert names == [{"name": f"stage {stage}"} for stage in range(4)]
        (process,) = (event for event in mine if event["name"] == "process_name")
        assert process["args"]["name"].startswith(timeline.name)
        peaks = [event["args"]["held"] for event in mine if event["ph"] == "C"]
        assert max(peaks) == 4


def test_counters_of_memory_start_with_what_is_fixed_and_show_peaks():
    memory = Costs(m_fixed=10, peak_b=3)
    timeline = timeline_of("ZBH1")
    events = trace_events(timeline, costs=memory)
    counts = [event for event in events if event["ph"] == "C"]
    for stage in range(4):
        mine = [e for e in counts if e["name"] == f"memory of stage {stage}"]
        assert mine[0]["args"] == {"held": 10} == mine[-1]["args"]
        assert mine[0]["ts"] == 0
        most = max(event["args"]["held"] for event in mine)
        assert most == peak_memory(timeline, memory)[stage] > 10 + 3


def test_times_are_microseconds_from_the_first_start():
    """Clocks of measured runs start anywhere."""
    timeline = timeline_of("ZBH1")
    rows = tuple(
        tuple(replace(s, start=s.start + 1e6, end=s.end + 1e6) for s in row)
        for row in timeline.rows
    )
    moved = replace(timeline, rows=rows)
    for unit, events in ((1, trace_events(moved)), (1e3, of_seconds(timeline))):
        first = next(event for event in events if event["ph"] == "X")
        assert (first["ts"], first["dur"]) == (0, pytest.approx(18522 * unit))
        assert first["args"] == {"chunk": 0, "microbatch": 0}


def of_seconds(timeline):
    return trace_events(timeline, microseconds_per_unit=1e6)


def test_what_a_file_says_of_its_timelines_is_read_back(tmp_path):
    path = tmp_path / "t.json"
    made = [timeline_of("1F1B"), timeline_of("ZBV")]
    write_trace(made, path, costs=Costs())
    for one, found in zip(made, read_trace(path), strict=True):
        assert replace(found, rows=one.rows) == one
    twice = replace(made[0], rows=tuple(row + row for row in made[0].rows))
    write_trace(twice, path)
    with pytest.raises(RequestError, match="not the jobs of one step"):
        read_trace(path)
    path.write_text('{"traceEvents": [{"ph": "X", "pid": 1}]}', encoding="utf-8")
    with pytest.raises(RequestError, match=r"t\.json: no trace that zbpp"):
        read_trace(path)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(RequestError, match=r"no/t\.json: cannot be written"):
        write_trace(timeline_of("ZBH1"), tmp_path / "no" / "t.json")


def unmatched(events):
    """Arrows without both ends, or with one that is in no job, or in a wrong one."""
    jobs = [e for e in events if e["ph"] == "X"]

    def job_at(end):
        return [
            job["name"]
            for job in jobs
            if (job["pid"], job["tid"]) == (end["pid"], end["tid"])
            and job["ts"] <= end["ts"] < job["ts"] + job["dur"]
        ]

    ends = {}
    for event in events:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], {})[event["ph"]] = event
    wrong = []
    for key, two in ends.items():
        names = [job_at(two[ph]) if ph in two else [] for ph in "sf"]
        if any(len(name) != 1 or name == ["O"] for name in names):
            wrong.append((key, names))
            continue
        source, target = (parse_job(name[0], stage=0) for name in names)
        forward = target.kind is PassKind.F and source.kind is PassKind.F
        step = 1 if forward else -1
        late = two["s"]["ts"] > two["f"]["ts"]
        if late or (source.chunk + step, source.microbatch) != (
            target.chunk,
            target.microbatch,
        ):
            wrong.append((key, names))
    return wrong


@pytest.mark.parametrize("mode", ["1F1B", "VPP", "ZBV"])
def test_every_arrow_joins_the_two_jobs_of_its_message(mode):
    timeline = timeline_of(mode)
    events = trace_events(timeline)
    n_arrows = sum(event["ph"] == "s" for event in events)
    stage_of = timeline.placement.stage_of
    crossings = sum(a != b for a, b in pairwise(stage_of))
    assert n_arrows == 2 * crossings * timeline.n_microbatches
    assert unmatched(events) == []
    wrong = [e for e in events if e["ph"] != "f" or e["id"] != "0.3"]
    assert len(unmatched(wrong)) == 1
    moved = [e | {"ts": e["ts"] + 1e5} if e["ph"] == "s" else e for e in events]
    assert len(unmatched(moved)) > n_arrows / 2


def test_arrows_of_several_iterations_stay_within_their_own():
    schedule = plan("ZBH1", n_stages=2, n_microbatches=3)
    twice = join(simulate_iterations(schedule, COSTS, 2))
    for message in messages(twice):
        (stage, source), (other, target) = message.source, message.target
        half = len(twice.rows[stage]) // 2, len(twice.rows[other]) // 2
        assert source // half[0] == target // half[1]
