"""Sends that occupy their stage: times by hand, figures, files and layers."""

from textwrap import dedent

import pytest

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
from zbpp.simulator import (
    bubble_rate,
    critical_path,
    idle,
    sending,
    simulate,
    simulate_iterations,
    span,
    step_time,
    work,
)

COSTS = Costs(comm=2.0, send_occupies=1.0, optimizer=1.0)
BY_EDGE = Costs(comm=2.0, send_occupies=(0.5, 0.0, 0.25))
V = Placement.wave(2)
TWO_STAGES = Schedule(
    "hand-made",
    Placement.single(2),
    2,
    tuple(
        tuple(parse_job(cell, stage=stage) for cell in row.split())
        for stage, row in enumerate(
            ("0F0 0F1 0B0 0W0 0B1 0W1 O", "1F0 1BW0 1F1 1BW1 O")
        )
    ),
)


def test_a_stage_waits_for_its_send_and_the_message_goes_on_from_the_pass() -> None:
    timeline = simulate(TWO_STAGES, COSTS)
    assert draw(timeline) == dedent("""\
        0 | F0  >   F1  >   .   .   .   .   B0  W0  .   .   B1  W1  O
        1 | .   .   .   F0  BW0 -   >   F1  BW1 -   >   .   .   .   O""")
    assert (work(timeline), sending(timeline)) == ([6, 6], [2, 2])
    assert (idle(timeline), span(timeline)) == ([6, 0], 14)
    assert bubble_rate(timeline) == 8 / 14
    path = critical_path(TWO_STAGES, COSTS)
    # 0F0 > 0F1, or > 1F0 1BW0 > 1F1 1BW1 > 0B1 0W1 O: messages of 2, 1 and 2
    assert (path.length, path.time_in_messages) == (step_time(timeline), 5) == (15, 5)
    assert [one.sending for one in simulate_iterations(TWO_STAGES, COSTS)] == [(1,)] * 2


def test_a_message_is_there_when_its_sender_is_free() -> None:
    timeline = simulate(TWO_STAGES, Costs(send_occupies=1.0, optimizer=1.0))
    assert draw(timeline) == dedent("""\
        0 | F0  >   F1  >   .   .   B0  W0  .   .   B1  W1  O
        1 | .   .   F0  BW0 -   >   F1  BW1 -   >   .   .   O""")


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


def test_a_report_tells_sends_apart(capsys) -> None:
    print_report(TWO_STAGES, COSTS, costs_named="x")
    shown = capsys.readouterr().out
    assert "57.14% of the longest span is beyond the work of the busiest" in shown
    assert "sends" in shown and "messages 5" in shown


def test_files_and_layers_keep_it(tmp_path) -> None:
    write_costs(BY_EDGE, tmp_path / "costs.json")
    assert read_costs(tmp_path / "costs.json") == BY_EDGE
    with pytest.raises(RequestError, match="send_occupies is -1"):
        parse_costs('{"send_occupies": -1}')
    with pytest.raises(RequestError, match="send_occupies has 5 entries for 2 stages"):
        Costs(send_occupies=(1.0,) * 5).on(V)
    layers = chunk_layers(BY_EDGE, V, (2, 1, 1, 1))
    write_layers(layers, tmp_path / "layers.json")
    assert parse_layers((tmp_path / "layers.json").read_text()) == layers
    assert layers.on(V, (2, 1, 1, 1)).on(V) == BY_EDGE.on(V)
    gathered = Costs(send_occupies=1.0, all_gather=1.0, gathers=True)
    assert gathered.on(V).f == (2.0, 1.0, 2.0, 1.0)


@pytest.mark.needs("torch")
def test_sleeping_chunks_sleep_for_it() -> None:
    from zbpp.emulation.layers import sleeping_chunks

    times = BY_EDGE.on(V)
    for chunk in range(4):
        wanted = [x[chunk] / 1e3 for x in (times.f, times.b, times.w)]
        whole = sleeping_chunks(times, range(chunk, chunk + 1))[0].times
        assert whole == pytest.approx(wanted)
