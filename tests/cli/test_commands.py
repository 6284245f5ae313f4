"""Commands that plan and draw: what they print, and the files that they write."""

import json
import re
import shlex
from importlib.metadata import version
from pathlib import Path

import pytest
from page_data import panels_of

from zbpp.core import read_costs
from zbpp.planning import MODES, plan, read_plan
from zbpp.schedules import add_collectives, post_validated, to_torch_csv
from zbpp.simulator import (
    bubble_rate,
    makespan,
    peak_memory,
    simulate,
    span,
    steady_step_time,
)

VALIDATED = "--enable_optimizer_post_validation"
BARRIER = "--no-enable_optimizer_post_validation"
TORCHTITAN = "torchtitan: --parallelism.pipeline_parallel_schedule"
FIRST_BYTES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}

LINES = {
    # plan
    "plan ZBH1 -p 2 -m 3 -o plan.json --csv torch.csv": [
        "plan.json: ZBH1, 2 stages, 3 micro-batches, bubble rate 10.00%, peak memory "
        "2, gap to the lower bound 0.00%\n",
        f"{TORCHTITAN} 1F1B --parallelism.pipeline_parallel_schedule_csv torch.csv "
        "--parallelism.pipeline_parallel_degree 2 "
        "--parallelism.pipeline_parallel_microbatch_size 1 "
        "--training.local_batch_size 3\n",
    ],
    "plan VPP -p 2 -m 3 --chunks_per_stage 3 -o plan.json --csv torch.csv": [
        f"{TORCHTITAN} Interleaved1F1B ",
        "so that there are 3 chunks a rank, 6 in all\n",
    ],
    "plan ZBV -p 2 -m 3 --data_parallel 2 -o plan.json --csv torch.csv": [
        f"{TORCHTITAN} ZBVZeroBubble "
    ],
    "plan ZBH1 -p 2 -m 4 --layers layers.json -o plan.json": [
        "split  5 3 layers\n",
        "step   65; even chunks: 72, so 9.7% shorter\n",
        "idle   7.7% of the stages' time, unequal work included; even chunks: 16.7%\n",
    ],
    "plan 1F1B -p 2 -m 4 --layers layers.json --split 2,6 -o plan.json": [
        "split  2 6 layers\n",
        "longer",
    ],
    "plan ZBV -p 2 -m 4 --costs bytes.json -o plan.json": [
        re.compile(r"peak memory 1\d\.\d GiB,")
    ],
    "plan auto -p 4 -m 12 --effort fast -o plan.json": [
        "plan.json: auto: ZBV, 4 stages"
    ],
    # show
    "show ZBH1 -p 2 -m 3": [
        """\
ZBH1: 2 stages, 3 micro-batches
0 | F0 F1 .  B0 W0 F2 B1 W1 B2 W2
1 | .  F0 B0 F1 B1 W0 F2 B2 W1 W2
""",
        "│     1 │      1 │    9 │    9 │    0 │         1.5 │\n",
        "bubble rate    10.00% of the longest span is beyond the work of the busiest "
        "stage\n",
        "makespan       10, first start to last end of a pass\n",
        "critical path  10 jobs, 10: F 3, B 4, W 3\n",
        "costs          none are given: F, B and W take 1, messages nothing\n",
        "lower bound    10 for the span (proof: ramp), within memory 2 a "
        "stage; gap 0.00%\n",
    ],
    "show ZBH2 -p 2 -m 3 --iterations 2": [
        """\
ZBH2, 2 iterations behind a barrier:
0 | F0 F1 F2 B0 W0 B1 W1 B2 W2 .  F0 F1 F2 B0 W0 B1 W1 B2 W2
1 | .  F0 B0 F1 B1 F2 B2 W0 W1 W2 .  F0 B0 F1 B1 F2 B2 W0 W1 W2
ZBH2, 2 iterations, post-validated:
0 | F0  F1  F2  VB0 W0  B1  W1  B2  W2  F0  F1  F2  VB0 W0  B1  W1  B2  W2
1 | .   F0  VB0 F1  B1  F2  B2  W0  W1  W2  F0  VB0 F1  B1  F2  B2  W0  W1  W2
""",
        "steady step    9 post-validated (a rollback adds 3), 10 behind a barrier\n",
    ],
    "show ZBV -p 2 -m 4 --costs bytes.json --memory_limit 13GiB": [
        re.compile(r"peak memory +1[123]\.\d GiB\n"),
        re.compile(r"│ +1[012]\.\d GiB │"),
        "within memory 13.0 GiB a stage",
        "costs          bytes.json\n",
    ],
    "show ZBV -p 4 -m 8": [
        "(the first 100 of 207 columns; COLUMNS=207 zbpp show prints all of them, -o "
        "x.svg draws them)\n"
    ],
    "show ZBV -p 2 -m 3 --costs gather.json --data_parallel 2 --shard optimizer": [
        "  + ",
        " 4 REDUCE_GRAD",
        " UNSHARD",
    ],
    # compare
    "compare -p 4 -m 8": [
        re.compile(r"│ 1F1B .* 4 │ 27\.27% │ +33 │ +33 │ +4 │ 22\.22% │"),
        re.compile(r"│ ZBV .* 8 │ +0\.00% │ +24 │ +25\.5 │ +4 │ +0\.00% │"),
        *(f"│ {mode} " for mode in MODES),
    ],
    "compare 1F1B auto -p 4 -m 12 --effort fast": ["\nauto: ZBV\n"],
    "compare -p 4 -m 8 --memory_limit 4": [
        re.compile(rf"{mode} with .*needs memory")
        for mode in ("FThenB", "VPP", "DualPipeV", "Combined1F1B")
    ],
    "compare ZBH1 ZBV -p 2 -m 4 --layers layers.json": [
        re.compile(r"ZBH1 +split 5 3: 9\.7% shorter than even chunks"),
        re.compile(r"ZBV +split \d \d \d \d: 12\.5% shorter"),
    ],
    "compare ZBH1 -p 2 -m 4 --costs bytes.json --memory_limit 14GiB": [
        re.compile(r"│ ZBH1 .* 1\d\.\d GiB")
    ],
    # mesh
    "mesh --devices 8 -m 16 --layers mesh.json": [
        "4 x 2",
        "<- auto",
        "pp 1 x dp 8: no split of 8 layers",
    ],
    "mesh --devices 4 -m 4 --layers mesh.json --memory_limit 200GiB "
    "--replica_bandwidth 1e15 --host_bandwidth 1e15": [
        re.compile(r"auto.*\n.*Reduction .*\n.*TwoLevel .*\n.*TopK\(0.01\) "),
        re.compile(r"Periodic\(every=100\) .*\n.*DiLoCo.*\n.*offload_optimizer "),
    ],
    # others
    "--version": [f"zbpp {version('zbpp')}\n"],
}
"""What a command prints, in part: texts, or patterns."""


@pytest.mark.parametrize("line", LINES)
def test_a_command_prints_and_writes(zbpp, line):
    out = zbpp(line)
    for part in LINES[line]:
        found = part in out if isinstance(part, str) else part.search(out)
        assert found, f"{part}\nis not in\n{out}"
    assert zbpp.err == ""
    named = re.findall(r"(?:-o|--csv) (\S+)", line)
    assert zbpp.files() == {*named}


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize(
    "line",
    [
        "show ZBH1 -p 2 -m 3 -o x.png",
        "show 1F1B,ZBV -p 2 -m 3 -o x.svg",
        "show 1F1B,ZBV -p 2 -m 3 -o x.html",
        "compare 1F1B ZBV ZBH1 -p 2 -m 3 -o x.pdf",
        "compare 1F1B ZBV ZBH1 -p 2 -m 3 -o x.html",
    ],
)
def test_a_command_writes_a_picture_and_names_it(zbpp, line):
    name = Path(line.split()[-1])
    assert zbpp(line).endswith(f"{name}\n")
    assert name.read_bytes().startswith(FIRST_BYTES.get(name.suffix, b"<!"))
    if name.suffix in (".svg", ".html"):
        assert "ZBV" in name.read_text(encoding="utf-8")


# Plans.


@pytest.mark.parametrize("mode", ["1F1B", "VPP", "ZBH2", "ZBV", "auto"])
def test_plan_and_show_have_the_figures_of_the_mode(zbpp, mode):
    costs = read_costs("costs.json")
    schedule = plan(mode, n_stages=3, n_microbatches=7, costs=costs)
    timeline = simulate(schedule, costs)
    sizes = f"{mode} -p 3 -m 7 --costs costs.json"
    out = zbpp(f"plan {sizes} -o plan.json --csv torch.csv")
    assert read_plan("plan.json").schedule == schedule
    assert Path("torch.csv").read_text() == to_torch_csv(schedule)
    shape = {(0, 1, 2): "1F1B", (0, 1, 2, 0, 1, 2): "Interleaved1F1B"}
    titan = shape.get(schedule.placement.stage_of, "ZBVZeroBubble")
    assert f"{TORCHTITAN} {titan} " in out
    data = zbpp.json(f"show {sizes}")
    assert (data["n_stages"], data["n_microbatches"]) == (3, 7)
    assert data["mode"] == {"auto": "auto: interleaved ZB"}.get(mode, mode)
    assert data["bubble_rate"] == bubble_rate(timeline)
    assert (data["span"], data["makespan"]) == (span(timeline), makespan(timeline))
    assert data["peak_memory"] == peak_memory(timeline, costs)
    assert data["lower_bound"] <= data["span"]
    assert data["gap"] == pytest.approx(data["span"] / data["lower_bound"] - 1)
    for more in ("", " --costs costs.json"):
        assert zbpp.json(f"show plan.json{more}") == data


@pytest.mark.parametrize(
    "line",
    [
        "plan ZBV -p 2 -m 4 -o x.json",
        "plan --mode zb-v --stages=2 --microbatches=4 --out=x.json",
        "plan --pipeline-schedule-mode ZBV -p 9 -p 2 -m 4 --out x.json",
    ],
)
def test_modes_are_positional_and_flags_have_several_spellings(zbpp, line):
    zbpp(line)
    assert read_plan("x.json").schedule == plan("ZBV", n_stages=2, n_microbatches=4)


def test_a_plan_is_shown_with_the_times_of_its_split(zbpp):
    zbpp("plan ZBH1 -p 2 -m 4 --layers layers.json --split 2,6 -o plan.json")
    assert read_plan("plan.json").schedule.split == (2, 6)
    asked = zbpp.json("show plan.json --layers layers.json")
    even = zbpp.json("show plan.json --layers layers.json --split even")
    assert asked["span"] == 4 * 3 * 8 > even["span"]
    assert "costs          those in plan.json\n" in zbpp("show plan.json")


def test_chunks_or_layers_to_recompute_are_named(zbpp):
    for flags, expected in (
        ("ZBV -p 3 --costs again.json --recompute all", (True,) * 6),
        (
            "ZBV -p 3 --costs again.json --recompute 0,3",
            (True, False, False, True, False, False),
        ),
        ("ZB -p 2 --layers layers.json --split even --recompute 0,5", ((0,), (1,))),
        ("plan.json --recompute 1", (False, True)),
    ):
        zbpp(f"plan {flags} -m 6 -o plan.json".replace("plan.json -m 6", "plan.json"))
        assert read_plan("plan.json").schedule.recompute == expected, flags
    assert "recompute      chunks 1\n" in zbpp("show plan.json")


# Steps in a row.


def test_v_is_planned_only_where_it_is_asked_for(zbpp):
    """Readers that know no V still read what is planned without the flag."""
    texts = {}
    for flag in ("", BARRIER, VALIDATED):
        zbpp(f"plan ZBH1 -p 2 -m 3 {flag} -o plan.json --csv torch.csv")
        texts[flag] = [Path(name).read_text() for name in ("plan.json", "torch.csv")]
    assert texts[""] == texts[BARRIER] and texts[""][1] == texts[VALIDATED][1]
    bare = plan("ZBH1", n_stages=2, n_microbatches=3)
    assert read_plan("plan.json").schedule == post_validated(bare)
    assert zbpp(f"show plan.json {BARRIER}") == zbpp("show ZBH1 -p 2 -m 3")


def test_a_flag_chooses_one_of_the_protocols_that_are_drawn(zbpp):
    line = "show ZBH2 -p 2 -m 3 --iterations 2"
    drawn = zbpp(line).splitlines()
    for flag, chosen in ((BARRIER, drawn[1:4]), (VALIDATED, drawn[4:7])):
        assert zbpp(f"{line} {flag}").splitlines()[1:5] == [*chosen, ""]


# Replicas.


@pytest.mark.parametrize(
    ("shard", "expected", "n_sums"),
    [
        ("none", {"shards": False}, 4),
        ("optimizer", {"shards": True}, 4),
        ("parameters", {"shards": False, "reduces": "every"}, 12),
    ],
)
def test_plans_for_replicas_have_collectives(zbpp, shard, expected, n_sums):
    costs = "--costs gather.json"
    zbpp(f"plan ZBV -p 2 -m 3 --data_parallel 2 --shard {shard} -o plan.json")
    alone = plan("ZBV", n_stages=2, n_microbatches=3)
    assert (
        read_plan("plan.json").schedule.orders
        == add_collectives(alone, **expected).orders
    )
    base = zbpp.json(f"show ZBV -p 2 -m 3 {costs}")
    assert zbpp.json(f"show plan.json {costs}")["step_time"] > base["step_time"]
    out = zbpp(f"show plan.json {costs}")
    assert f" {n_sums} REDUCE_GRAD" in out
    assert ("UNSHARD" in out) == expected["shards"]


def test_times_and_memory_of_replicas_follow_from_the_layers(zbpp):
    """A stage of 4 layers with 10 bytes each: a ring of 2 at 5 a unit, alpha 1."""
    layers = {
        "n_layers": 8, "parameters": 10, "m_fixed": 40,
        "replica_bandwidth": 5, "replica_delay": 1,
    }  # fmt: skip
    Path("l.json").write_text(json.dumps(layers))
    line = "show ZBH1 -p 2 -m 3 --layers l.json"
    base = zbpp.json(line)
    for shard, saved in (("none", 0), ("optimizer", 4 * (40 - 20 - 30 / 2))):
        found = zbpp.json(f"{line} --data_parallel 2 --shard {shard}")
        added = found["step_time"] - base["step_time"]
        assert added == pytest.approx(4 * 2 * (1 + 10 / 2 / 5))
        assert base["peak_memory"][0] - found["peak_memory"][0] == saved


def test_passes_that_gather_take_all_gather_longer(zbpp):
    """3 F's and 3 B's of a stage, each 2 longer; nothing gathers meanwhile."""
    costs = {"f": 1, "b": 1, "w": 1, "all_gather": 2, "reduce_scatter": 1}
    Path("gathered.json").write_text(json.dumps(costs))
    line = "show ZBH1 -p 1 -m 3 --costs gathered.json"
    base = zbpp.json(line)
    for shard, more in (("parameters", 6 * 2), ("gradients", 0)):
        found = zbpp.json(f"{line} --data_parallel 2 --shard {shard}")
        assert found["span"] - base["span"] == more
    Path("gathered.json").write_text(json.dumps(costs | {"f": [1]}))
    zbpp(f"{line} --data_parallel 2 --shard parameters", code=2)
    assert "each of the three as one number, or each as a list" in zbpp.err


# Comparisons.


def test_compare_has_the_figures_of_each_mode_and_of_each_costs_file(zbpp):
    line = "compare -p 2 -m 3 --effort fast --costs costs.json,even.json"
    data = zbpp.json(line)
    assert zbpp(line.replace(",", " ")).count("peak memory") == 2
    for one in data["comparisons"]:
        costs = read_costs(one["costs"])
        assert [row["mode"] for row in one["modes"]] == [*MODES]
        base = next(row["step"] for row in one["modes"] if row["mode"] == "1F1B")
        for row in one["modes"]:
            mode = row["mode"]
            schedule = plan(
                mode, n_stages=2, n_microbatches=3, costs=costs, effort="fast"
            )
            timeline = simulate(schedule, costs)
            assert row["bubble_rate"] == bubble_rate(timeline)
            assert row["span"] == span(timeline)
            assert row["peak_memory"] == peak_memory(timeline, costs)
            checked = post_validated(schedule) if mode == "ZBH1" else schedule
            if mode in ("ZBH1", "1F1B"):
                assert row["step"] == steady_step_time(checked, costs)
            assert row["speed_up"] == base / row["step"]
    behind = zbpp.json(f"compare ZBH1 -p 2 -m 3 --costs costs.json {BARRIER}")
    ((row,),) = [one["modes"] for one in behind["comparisons"]]
    assert row["step"] == row["step_time_barrier"] > row["step_time_post_validation"]


def test_a_mode_that_does_not_fit_has_a_reason_in_data_and_page(zbpp):
    data = zbpp.json("compare FThenB 1F1B -p 2 -m 3 --memory_limit 2 -o x.html")
    refused, _ = data["comparisons"][0]["modes"]
    assert "needs memory" in refused["reason"] and "step" not in refused
    assert refused["reason"].split(";")[0] in Path("x.html").read_text("utf-8")


def test_a_page_has_the_command_that_repeats_it(zbpp):
    line = (
        "compare ZBV ZBH1 -p 2 -m 3 --costs costs.json --memory_limit 40.3 "
        f"{BARRIER} --out 'a page.html'"
    )
    zbpp(line)
    text = Path("a page.html").read_text("utf-8")
    assert sorted(panel["name"] for panel in panels_of(text)) == ["ZBH1", "ZBV"]
    program, *words = shlex.split(zbpp.json(line)["command"])
    assert (program, words[-1]) == ("zbpp", "--json")
    zbpp(shlex.join(words[:-1]))
    assert Path("a page.html").read_text("utf-8") == text


# Help.


def test_the_help_of_a_command_fits_on_a_screen_and_a_half(zbpp, monkeypatch):
    commands = re.findall(r"^│ (\w+) ", zbpp("--help"), re.MULTILINE)
    assert {"plan", "show", "compare", "mesh", "train", "bench"} <= {*commands}
    for width, most in ((80, 60), (100, 48)):
        monkeypatch.setenv("COLUMNS", str(width))
        for command in commands:
            lines = zbpp(f"{command} --help").splitlines()
            assert len(lines) <= most and max(map(len, lines)) <= width, command
