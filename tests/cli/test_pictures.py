"""zbpp compare and show --out: data, pages, several schedules and costs."""

import csv
import json
import shlex

import pytest
from commands import SIZES, ZBH1
from timeline_page import boxes_in, boxes_of_timeline, page_data, same_boxes

from zbpp.cli import main
from zbpp.cli.commands import Compare
from zbpp.cli.several import command_text
from zbpp.core import Costs, read_costs
from zbpp.planning import MODES, plan
from zbpp.simulator import (
    bubble_rate,
    simulate,
    span,
    steady_step_time,
)

FAST = ["--effort", "fast"]
COMPARE = ["compare", *SIZES, *FAST]


def compared(capsys, *arguments):
    assert main([*COMPARE, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_compare_json_has_the_simulators_figures(capsys, costs_file):
    data = compared(capsys, "--costs", costs_file)
    assert (data["n_stages"], data["n_microbatches"]) == (2, 3)
    (one,) = data["comparisons"]
    assert one["costs"] == costs_file
    rows = {row["mode"]: row for row in one["modes"]}
    assert list(rows) == list(MODES)
    costs = read_costs(costs_file)
    steps = {}
    for mode in ("1F1B", "ZBH1", "ZBV"):
        schedule = plan(
            mode,
            n_stages=2,
            n_microbatches=3,
            costs=costs,
            effort="fast",
        )
        timeline = simulate(schedule, costs)
        assert rows[mode]["bubble_rate"] == bubble_rate(timeline)
        assert rows[mode]["span"] == span(timeline)
        steps[mode] = rows[mode]["step"]
        assert rows[mode]["speed_up"] == steps["1F1B"] / steps[mode]
    assert steps["1F1B"] == steady_step_time(schedule_of("1F1B"), costs)
    assert steps["ZBH1"] == rows["ZBH1"]["step_time_post_validation"]
    behind = compared(
        capsys, "--costs", costs_file, "--no-enable_optimizer_post_validation"
    )
    again = {row["mode"]: row for row in behind["comparisons"][0]["modes"]}
    assert again["ZBH1"]["step"] == rows["ZBH1"]["step_time_barrier"]
    assert again["ZBH1"]["step"] > steps["ZBH1"]


def schedule_of(mode):
    return plan(mode, n_stages=2, n_microbatches=3)


def test_a_mode_that_cannot_be_had_has_a_reason_in_data_and_page(capsys, tmp_path):
    path = tmp_path / "x.html"
    data = compared(capsys, "--memory_limit", "2", "--out", str(path))
    rows = {row["mode"]: row for row in data["comparisons"][0]["modes"]}
    assert "needs memory" in rows["FThenB"]["reason"] and "step" not in rows["FThenB"]
    assert rows["FThenB"]["reason"].split(";")[0] in path.read_text(encoding="utf-8")


def test_several_costs_have_a_table_each(capsys, tmp_path, costs_file):
    other = tmp_path / "other.json"
    other.write_text('{"f": 1, "b": 1, "w": 1}')
    both = f"{costs_file},{other}"
    assert main([*COMPARE, "--costs", both, "--csv", str(tmp_path / "x.csv")]) == 0
    text = capsys.readouterr().out
    assert text.count("peak memory") == 2
    with open(tmp_path / "x.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["mode"] for row in rows] == [*MODES, *MODES]
    assert {row["costs"] for row in rows} == {costs_file, str(other)}
    data = compared(capsys, "--costs", both)
    modes = [
        (one["costs"], mode) for one in data["comparisons"] for mode in one["modes"]
    ]
    for row, (costs, mode) in zip(rows, modes, strict=True):
        assert (row["costs"], row["mode"]) == (costs, mode["mode"])
        assert float(row["span"]) == mode["span"]
        assert float(row["peak_memory"]) == max(mode["peak_memory"])
    assert main([*COMPARE, "--costs", f"{costs_file},missing.json"]) == 2
    assert "missing.json: cannot be read" in capsys.readouterr().err


def test_chunks_per_stage_reach_the_modes_that_take_them(capsys):
    data = compared(capsys, "--chunks_per_stage", "3")
    rows = {row["mode"]: row for row in data["comparisons"][0]["modes"]}
    chunks = {mode: len(row["placement"]) // 2 for mode, row in rows.items()}
    assert (chunks["VPP"], chunks["ZBVPP"], chunks["auto"]) == (3, 3, 3)
    assert (chunks["1F1B"], chunks["ZBV"]) == (1, 2)


@pytest.mark.slow
@pytest.mark.needs("matplotlib")
def test_a_page_tells_the_command_that_repeats_it(capsys, tmp_path, costs_file):
    path = tmp_path / "a page.html"
    assert main([*COMPARE, "--costs", costs_file, "--out", str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"{path}\n")
    text = path.read_text(encoding="utf-8")
    data = page_data(text)
    names = [panel["name"] for panel in data["panels"]]
    assert names == list(MODES)
    costs = read_costs(costs_file)
    one = plan("ZBV", n_stages=2, n_microbatches=3, costs=costs, effort="fast")
    panel = data["panels"][names.index("ZBV")]
    assert same_boxes(boxes_in(data, panel), boxes_of_timeline(simulate(one, costs)))
    command = compared(capsys, "--costs", costs_file, "--out", str(path))["command"]
    program, *words = shlex.split(command)
    assert (program, words[-1]) == ("zbpp", "--json")
    words.remove("--json")
    assert main(words) == 0
    assert path.read_text(encoding="utf-8") == text
    assert text.count("data:image/svg") == 1


def test_the_words_of_a_command_are_those_that_were_given():
    words = ["--memory_limit", "16GiB", "--no_enable_optimizer_post_validation"]
    one = Compare(
        stages=2,
        microbatches=3,
        memory_limit=16.0 * 2**30,
        enable_optimizer_post_validation=False,
    )
    sizes = ["--stages", "2", "--microbatches", "3"]
    assert command_text(one).split() == ["zbpp", "compare", *sizes, *words]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_compare_draws_its_charts(capsys, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"x.{suffix}"
    assert main([*COMPARE, "--out", str(path)]) == 0
    assert path.stat().st_size > 5000
    if suffix == "svg":
        text = path.read_text(encoding="utf-8")
        assert "1F1B" in text and "auto" in text and "micro-batches in a step" in text
    assert main([*COMPARE, "--out", "x.gif"]) == 2
    assert "x.gif: the name of a picture must end in" in capsys.readouterr().err


def test_show_draws_several_schedules(tmp_path, capsys):
    file = tmp_path / "plan.json"
    assert main(["plan", *ZBH1, "--out", str(file)]) == 0
    page = tmp_path / "x.html"
    several = f"1F1B,{file},ZBV"
    assert main(["show", several, *SIZES, "--out", str(page)]) == 0
    data = page_data(page.read_text(encoding="utf-8"))
    panels = data["panels"]
    assert [panel["name"] for panel in panels] == ["1F1B", "ZBH1", "ZBV"]
    for panel in panels:
        one = simulate(schedule_of(panel["name"]), Costs())
        assert same_boxes(boxes_in(data, panel), boxes_of_timeline(one))
        assert panel["limit"] is Costs().memory_limit
    capsys.readouterr()
    assert main(["show", "1F1B,ZZZ", *SIZES, "--out", str(page)]) == 2
    assert "unknown schedule mode 'ZZZ'" in capsys.readouterr().err


def test_several_schedules_are_traced_and_drawn_together(tmp_path):
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "x.json", tmp_path / "x.svg"
    assert main(["show", "1F1B,ZBV", *SIZES, "--out", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert main(["show", "1F1B,ZBV", *SIZES, "--out", str(picture)]) == 0
    text = picture.read_text(encoding="utf-8")
    assert "1F1B   2 stages" in text and "ZBV   2 stages" in text


def test_iterations_are_drawn_on_a_page(tmp_path):
    page = tmp_path / "x.html"
    flags = ["--iterations", "2", "--out", str(page)]
    assert main(["show", *ZBH1, *flags]) == 0
    names = [p["name"] for p in page_data(page.read_text(encoding="utf-8"))["panels"]]
    assert [name.partition(", ")[2] for name in names] == [
        "2 iterations behind a barrier",
        "2 iterations, post-validated",
    ]
