"""Sends that occupy their stage: times by hand, figures, pictures, and files."""

from textwrap import dedent

import pytest
from timeline_page import boxes_in, page_data, page_text

from zbpp.cli.report import print_report
from zbpp.core import (
    Costs,
    Placement,
    RequestError,
    Schedule,
    draw,
    parse_costs,
    parse_job,
    parse_layers,
    read_costs,
    write_costs,
    write_layers,
)
from zbpp.core.costs import chunk_layers
from zbpp.emulation.build import sleeping_chunks, sleeping_layers
from zbpp.planning.replicas import with_gathers
from zbpp.simulator import (
    bubble_rate,
    critical_path,
    idle,
    plot,
    read_trace,
    sending,
    simulate,
    simulate_iterations,
    span,
    step_time,
    trace_events,
    work,
    write_trace,
)
from zbpp.simulator.page import PageEntry

COSTS = Costs(comm=2.0, send_occupies=1.0, optimizer=1.0)
V = Placement.wave(2)


def hand_made(*rows: str) -> Schedule:
    orders = tuple(
        tuple(parse_job(cell, stage=stage) for cell in row.split())
        for stage, row in enumerate(rows)
    )
    return Schedule("hand-made", Placement.single(len(rows)), 2, orders)


TWO_STAGES = hand_made("0F0 0F1 0B0 0W0 0B1 0W1 O", "1F0 1BW0 1F1 1BW1 O")


def test_a_stage_waits_for_its_send_and_the_message_goes_on_from_the_pass() -> None:
    timeline = simulate(TWO_STAGES, COSTS)
    assert draw(timeline) == dedent("""\
        0 | F0  >   F1  >   .   .   .   .   B0  W0  .   .   B1  W1  O
        1 | .   .   .   F0  BW0 -   >   F1  BW1 -   >   .   .   .   O""")
    assert (work(timeline), sending(timeline)) == ([6, 6], [2, 2])
    assert (idle(timeline), span(timeline)) == ([6, 0], 14)
    assert bubble_rate(timeline) == 8 / 14
    path = critical_path(TWO_STAGES, COSTS)
    assert path.length == step_time(timeline) == 15
    # 0F0 > 0F1, or > 1F0 1BW0 > 1F1 1BW1 > 0B1 0W1 O: messages of 2, 1 and 2
    assert (path.length, path.time_in_messages) == (15, 5)


def test_a_message_is_there_when_its_sender_is_free() -> None:
    timeline = simulate(TWO_STAGES, Costs(send_occupies=1.0, optimizer=1.0))
    assert draw(timeline) == dedent("""\
        0 | F0  >   F1  >   .   .   B0  W0  .   .   B1  W1  O
        1 | .   .   F0  BW0 -   >   F1  BW1 -   >   .   .   O""")


def test_as_a_pure_delay_it_occupies_nothing() -> None:
    """Control: the same orders with the whole message on its way."""
    timeline = simulate(TWO_STAGES, Costs(comm=2.0, optimizer=1.0))
    assert ">" not in draw(timeline) and timeline.sending == ()
    assert span(timeline) < 14


@pytest.mark.parametrize("nothing", [0.0, (0.0,), (0.0, 0.0, 0.0)])
def test_no_time_gives_the_same_bits(nothing: float | tuple[float, ...]) -> None:
    costs = Costs(0.1, 0.7, 1.3, comm=0.3, loss=0.1)
    also = Costs(0.1, 0.7, 1.3, comm=0.3, loss=0.1, send_occupies=nothing)
    assert also.on(V) == costs.on(V)


def test_within_a_stage_nothing_is_sent() -> None:
    times = Costs(comm=1.0, send_occupies=(0.25,)).on(V)
    assert times.sending == (0.25, 0.0, 0.25)
    assert times.f == (0.75, 0.5, 0.75, 0.5) and times.b == (0.5, 0.75, 0.5, 0.75)
    assert times.w == (0.5,) * 4 and times.hops == (0.75, 0.0, 0.75)
    joint = Costs(comm=1.0, send_occupies=0.25, splits=(True, False)).on(V)
    assert joint.b == (0.5, 1.25, 1.0, 0.75) and joint.reduction == times.reduction == 2


def test_iterations_keep_it() -> None:
    first, second = simulate_iterations(TWO_STAGES, COSTS, 2)
    assert first.sending == second.sending == (1.0,)


def test_pictures_pages_and_traces_show_it(tmp_path, capsys) -> None:
    timeline = simulate(TWO_STAGES, COSTS)
    plot(timeline, tmp_path / "drawn.svg")
    assert 'id="SEND 0"' in (tmp_path / "drawn.svg").read_text(encoding="utf-8")
    plot(simulate(TWO_STAGES, Costs(comm=2.0)), tmp_path / "plain.svg")
    assert "SEND" not in (tmp_path / "plain.svg").read_text(encoding="utf-8")
    data = page_data(page_text([PageEntry(name="x", simulated=timeline)]))
    jobs = boxes_in(data, data["panels"][0])[1]
    assert jobs[1:4] == [("1BW0", 4, 6), ("1SEND0", 6, 7), ("1F1", 7, 8)]
    events = [event for event in trace_events(timeline) if event["ph"] == "X"]
    sent = {event["name"]: event for event in events if event["cat"] == "SEND"}
    assert len(sent) == 4 and len(events) == 12 + 4
    assert (sent["send of 1BW0"]["ts"], sent["send of 1BW0"]["dur"]) == (6000, 1000)
    write_trace(timeline, tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json") == [timeline]
    print_report(TWO_STAGES, COSTS)
    shown = capsys.readouterr().out
    assert (
        "57.14% of the longest span is beyond the work of the busiest stage, sends"
        in shown
    )
    assert "sends" in shown and "messages 5" in shown


def test_files_and_layers_keep_it(tmp_path) -> None:
    costs = Costs(comm=2.0, send_occupies=(0.5, 0.0, 0.25))
    write_costs(costs, tmp_path / "costs.json")
    assert read_costs(tmp_path / "costs.json") == costs
    write_costs(Costs(), tmp_path / "plain.json")
    assert "send_occupies" not in (tmp_path / "plain.json").read_text(encoding="utf-8")
    with pytest.raises(RequestError, match="send_occupies is -1"):
        parse_costs('{"send_occupies": -1}')
    with pytest.raises(RequestError, match="send_occupies has 5 entries for 2 stages"):
        Costs(send_occupies=(1.0,) * 5).on(V)
    layers = chunk_layers(costs, V, (2, 1, 1, 1))
    write_layers(layers, tmp_path / "layers.json")
    assert parse_layers((tmp_path / "layers.json").read_text()) == layers
    assert layers.on(V, (2, 1, 1, 1)).on(V) == costs.on(V)
    gathered = with_gathers(
        Costs(send_occupies=1.0, all_gather=1.0),
        data_parallel=2,
        shard="parameters",
    )
    assert gathered.on(V).f == (2.0, 1.0, 2.0, 1.0)


def test_sleeping_layers_sleep_for_it() -> None:
    costs = Costs(comm=2.0, send_occupies=(0.5, 0.0, 0.25))
    times = costs.on(V)
    chunks = [sleeping_chunks(times, range(c, c + 1))[0].times for c in range(4)]
    layers = chunk_layers(costs, V, (2, 1, 1, 1))
    sends = dict(zip((2, 3, 4), times.sending, strict=True))
    parts = [range(2), *(range(c + 1, c + 2) for c in range(1, 4))]
    by_layer = [
        [sum(kind) for kind in zip(*(one.times for one in own), strict=True)]
        for own in (sleeping_layers(layers, sends, part) for part in parts)
    ]
    for chunk, (f_s, b_s, w_s) in enumerate(chunks):
        wanted = (times.f[chunk], times.b[chunk], times.w[chunk])
        assert (f_s, b_s, w_s) == pytest.approx([one / 1e3 for one in wanted])
        assert by_layer[chunk] == pytest.approx([f_s, b_s, w_s])
