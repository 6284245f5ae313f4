"""All that the documents show runs: commands, sessions, files, figures."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from pages import (
    ROOT,
    SCHEMAS,
    Page,
    is_dear,
    missing_paths,
    mistakes,
    parse_data,
    run_commands,
    run_on_ranks,
    run_script,
    run_session,
    shown_lines,
    unknown_flags,
    unknown_names,
)

from zbpp.cli import main
from zbpp.core import Costs, LayerCosts, Parts, schedule_text, write_costs
from zbpp.planning import MODES, plan
from zbpp.schedules import add_collectives, post_validated
from zbpp.simulator import bubble_rate, peak_memory, simulate

README = Page.read("README.md")
DOCS = [
    Page.read(path.relative_to(ROOT).as_posix())
    for path in sorted((ROOT / "docs").rglob("*.md"))
]
GUIDES = [README, *DOCS]
OTHERS = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/README.md",
    "examples/torchtitan.md",
)

DEAR_SESSIONS = {
    "README.md",  # draws
    "docs/how_to/models.md",  # loads transformers
    "docs/how_to/memory.md",  # measures a model
    "docs/how_to/overlap.md",  # trains one
    "docs/how_to/simulating.md",  # draws
    "docs/how_to/your_script.md",  # measures a model
}
PLANS_LONG = {
    "docs/how_to/planning.md",
    "docs/how_to/data_parallel.md",
    "docs/reference/costs.md",
    "docs/reference/data_parallel.md",
}
AT_NIGHT = {
    "docs/how_to/benchmarking.md",  # repeats tests/bench
    "docs/how_to/data_parallel.md",  # repeats tests/memory
    "docs/how_to/memory.md",  # repeats tests/cli
    "docs/how_to/planning.md",  # repeats the page on profiles
    "docs/how_to/simulating.md",  # likewise
    "docs/how_to/troubleshooting.md",  # likewise
    "docs/reference/formats.md",
}

by_name = {"ids": lambda page: page.name}


def marks_of(page):
    slow = [pytest.mark.slow] * (page.name in DEAR_SESSIONS)
    return slow + [pytest.mark.nightly] * (page.name == "docs/how_to/models.md")


# Every page.


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = re.findall(r": (\S+\.md)$", menu, re.MULTILINE)
    written = {page.name.removeprefix("docs/") for page in DOCS}
    assert len(named) == len(set(named)) and written <= set(named)
    for name in set(named) - written:  # made when the site is built
        assert name.startswith("reference/"), name


@pytest.mark.parametrize("page", GUIDES, **by_name)
def test_every_block_is_of_a_kind_that_is_tested(page):
    languages = set(re.findall(r"^```(\w+)$", page.text, re.MULTILINE))
    assert languages <= {"bash", "python", "diff", "json", "text"}
    assert page.text.count("```") == 2 * sum(
        len(page.blocks(language)) for language in languages
    )
    for block in page.blocks("python"):
        assert ">>>" in block.text or block.file, block.before
        assert ">>>" in block.text or compile(block.text, page.name, "exec")
    for block in page.blocks("diff"):
        assert block.file and all(line[:1] in "-+ " for line in block.text.split("\n"))
        assert all(compile(block.side(mark), block.file, "exec") for mark in "-+")
    programs = {first for first, *_ in page.commands()}
    assert programs <= {"make", "pip", "zbpp", "torchrun", "python"}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=marks_of(page)) for page in GUIDES if page.session()],
    **by_name,
)
def test_the_sessions_run(page, tmp_path):
    assert run_session(page, tmp_path) > 2


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page.name in PLANS_LONG else ())
        for page in GUIDES
        if page.commands("zbpp")
    ],
    **by_name,
)
def test_a_sample_of_commands_runs(page, tmp_path, capsys):
    if run_commands(page, tmp_path, dear=False):
        assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, marks=pytest.mark.nightly if p.name in AT_NIGHT else ())
        for p in GUIDES
        if any(map(is_dear, p.commands("zbpp")))
    ],
    **by_name,
)
def test_all_commands_run(page, tmp_path):
    run_commands(page, tmp_path, dear=True)


@pytest.mark.parametrize(
    ("page", "words", "lines"),
    [(page, *shown) for page in GUIDES for shown in shown_lines(page)],
    ids=lambda part: part.name if isinstance(part, Page) else part[0],
)
def test_the_output_that_is_shown_is_printed(
    page, words, lines, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for block in page.blocks("json"):
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
    main(words)
    captured = capsys.readouterr()
    assert "\n".join(lines) in (captured.out + captured.err)


@pytest.mark.parametrize("page", [*GUIDES, *map(Page.read, OTHERS)], **by_name)
def test_paths_and_links_exist(page):
    assert not missing_paths(page)


ROOMS = (
    *("core", "schedules", "simulator", "runtime", "models", "checkpoint"),
    "averaging",
)


@pytest.mark.parametrize("page", GUIDES, **by_name)
def test_data_flags_and_names_that_are_shown_are_valid(page):
    assert parse_data(page) == len(page.blocks("json"))
    assert not unknown_flags(page)
    assert not unknown_names(page)
    used = set(re.findall(r"(?:from|import) (zbpp[\w.]*)", page.text))
    assert used <= {"zbpp", *(f"zbpp.{room}" for room in ROOMS)}


def wrong(text: str) -> Page:
    return Page("README.md", text)


def test_a_wrong_session_or_command_fails(tmp_path):
    for text in (
        "```python\n>>> 1 + 1\n3\n```\n",
        "```python\n>>> from zbpp.core import Nothing\n```\n",
        "```python\n>>> 1 + 1\n2\n```\n\n```python\n>>> nothing\n```\n",
    ):
        with pytest.raises(AssertionError, match="Failed example"):
            run_session(wrong(text), tmp_path)
    with pytest.raises(AssertionError, match=r"missing\.json"):
        run_commands(
            wrong("```bash\nzbpp show missing.json\n```\n"), tmp_path, dear=False
        )


def test_a_wrong_file_link_flag_or_name_is_found():
    with pytest.raises(ValueError, match="F"):
        parse_data(wrong('```json\n{"F": 1}\n```\n'))
    modes = "docs/concepts/modes.md"
    page = wrong(f"[a](docs/none.md) [b]({modes}#none) [c]({modes}#modes)")
    assert missing_paths(page) == ["docs/none.md", f"{modes}#none"]
    flags = wrong("--costs --no_enable_optimizer_post_validation --none")
    assert unknown_flags(flags) == ["--none"]
    page = wrong("`zbpp.core.draw` `zbpp.Pipeline(x)` `zbpp.core.none` `zbpp.none.x`")
    assert unknown_names(page) == ["zbpp.core.none", "zbpp.none.x"]


# Troubleshooting.


def errors_shown(page: Page) -> list[str]:
    """Parts of the errors that a page quotes, in a table or as indented lines."""
    table = re.findall(r"^\| (`.*?) \|", page.text, re.MULTILINE)
    quoted = [words for row in table for words in re.findall(r"`([^`]*)`", row)]
    quoted += re.findall(r"^    (\w[^>\n]*: .*)$", page.text, re.MULTILINE)
    names = r"\w+Error: |\b(?:stage|rank|layers\.)? ?[\d.]+%?|\dB\d|ZBH1|\u2026|[();,:]"
    return [
        part.strip()
        for words in quoted
        for part in re.split(names, words)
        if len(part.split()) > 2
    ]


def literals() -> str:
    """All texts of the package, as they are put together from pieces of lines."""
    files = [*ROOT.glob("zbpp/**/*.py"), *ROOT.glob("src/zbpp/**/*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in files)
    return re.sub(r"\"\s*f?\"", "", text)


def test_the_errors_that_are_quoted_are_in_the_code():
    page = Page.read("docs/how_to/troubleshooting.md")
    parts, code = errors_shown(page), literals()
    assert len(parts) > 15
    assert not [part for part in parts if part not in code]
    made_up = Page("x", "| `no such words at all` | |\n")
    assert [part for part in errors_shown(made_up) if part not in code]


# The schemas of files. What needs a run is checked where it runs, by `mistakes`.

PARTS = Parts(
    (("compute", 1), ("network", 1)),
    (("network", 1), ("compute", 2)),
    (("compute", 1),),
)
COSTS = Costs(speed=(1, 2), comm=0.5, m_b=2.0**30)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_valid_and_the_page_links_it(name):
    assert mistakes(name, None)  # it is checked before it is used
    page = ROOT / "docs" / "reference" / "schemas.md"
    assert f"(schemas/{name}.schema.json)" in page.read_text()


@pytest.mark.parametrize("mode", ["1F1B", "ZBH2", "ZBV"])
def test_the_schema_of_schedules(mode):
    schedule = plan(mode, n_stages=2, n_microbatches=4)
    sharded = add_collectives(schedule, shards=True)
    for variant in (schedule, post_validated(schedule), sharded):
        data = json.loads(schedule_text(variant))
        assert not mistakes("schedule", data)
        data["jobs"][0][0] = "0X0"
        assert "'0X0' does not match" in mistakes("schedule", data)[0]


@pytest.mark.parametrize(
    ("kind", "costs", "wrong", "words"),
    [
        ("costs", COSTS, {"F": 1}, "ZBV"),
        ("costs", COSTS, {"m_b": "1.5 cows"}, "1F1B"),
        ("costs", Costs(parts=PARTS), {"parts": {"f": [["wire", 1]]}}, "ZB"),
        ("layers", LayerCosts(6, m_r=0.1), {"n_layers": "six"}, "ZBV --recompute all"),
        ("layers", LayerCosts(4, parts=(PARTS,) * 4), {"parts": [{"f": 2}]}, "1F1B"),
    ],
)
def test_the_schemas_of_costs_and_of_plans_for_them(
    kind, costs, wrong, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_costs(costs, "x.json")
    data = json.loads(Path("x.json").read_text())
    assert not mistakes(kind, data)
    assert mistakes(kind, data | wrong)
    line = f"plan {words} --{kind} x.json -p 2 -m 4 -o plan.json"
    assert main(line.split()) == 0
    file = json.loads(Path("plan.json").read_text())
    assert not mistakes("plan", file)
    file["schedule"]["jobs"][1][0] = 7  # the schema of schedules takes part
    assert len(mistakes("plan", file)) == 1
    # the parser lists its keys where it refuses one: they are the schema's
    Path("x.json").write_text(json.dumps(data | {"nothing": 1}))
    capsys.readouterr()
    assert main(line.split()) == 2
    listed = set(re.findall(r"\w+", capsys.readouterr().err))
    assert SCHEMAS[kind]["properties"].keys() <= listed


# The README.


def test_the_readme_is_short_and_opens_with_what_a_reader_needs():
    assert len(README.text.split()) <= 700
    first = "\n".join(README.text.splitlines()[:45])
    needed = ("Status: ", "No GPU", "schedules.svg", "pip install", "plot(")
    for shown in (*needed, "zbpp.Pipeline(", "pipeline.step(", "torchrun "):
        assert shown in first, shown


def test_the_modes_have_the_figures_that_the_readme_gives():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|", README.text, re.MULTILINE)
    assert [mode for mode, *_ in rows] == list(MODES)
    for mode, rate, memory in rows:
        timeline = simulate(plan(mode, n_stages=4, n_microbatches=8))
        if mode != "auto":
            assert f"{bubble_rate(timeline):.2%}" == rate
            assert f"{max(peak_memory(timeline, Costs())):g}" == memory


def test_the_targets_and_packages_that_are_installed_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {name for name, *_ in README.commands("make")} <= {*targets}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\.\[(.*?)\]", README.text):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert any(words[-1].startswith(".[") for words in README.commands("pip"))


# The scripts.


def page_with(file: str, *pages: Page) -> Page:
    """The first page that has a file; of all, unless pages are given."""
    return next(page for page in pages or GUIDES if file in page.files())


def test_the_readmes_script_prints_the_losses_that_are_shown(tmp_path, capsys):
    (((name,), shown),) = shown_lines(README, "python")
    text = README.files()[name].replace("range(100)", "range(21)")
    assert "range(21)" in text
    five_minutes = page_with(name, *DOCS)
    assert five_minutes.files()[name] == README.files()[name]
    assert [*shown_lines(five_minutes, "python")] == [([name], shown)]
    (tmp_path / name).write_text(text)
    run_script(tmp_path / name)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    for line, expected in zip(printed, shown, strict=False):
        *words, loss = expected.split()
        assert line.split()[:-1] == words
        # other processors round otherwise
        assert float(line.split()[-1]) == pytest.approx(float(loss), abs=0.02)
    losses = [float(line.split()[-1]) for line in shown]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 2


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("file", "more", "begins"),
    [
        ("train.py", "", "step  0  loss "),
        ("my_train.py", "", "step 5  loss "),
        ("torch_zbv.py", "", "loss "),
        ("mesh_train.py", "if pipeline.rank == 0: print(result.loss)\n", "0."),
    ],
)
def test_the_scripts_print_the_same_under_torchrun(
    file, more, begins, tmp_path, capsys
):
    page = page_with(file)
    text = page.files()[file].replace("range(100)", "range(15)")
    (tmp_path / file).write_text(text + more)
    (words,) = [words for words in page.commands("torchrun") if file in words]
    n_ranks = int(words[words.index("--nproc-per-node") + 1])
    printed = run_on_ranks(n_ranks, tmp_path, *words[words.index(file) :])
    assert printed.startswith(begins)
    alone = [words for words in page.commands("python") if file in words] or [[file]]
    if file not in ("torch_zbv.py", "mesh_train.py"):  # these need processes
        run_script(tmp_path / file, *alone[0][1:])
        assert capsys.readouterr().out == printed


MIGRATED = {
    block.file: block
    for page in DOCS
    if page.name.startswith("docs/coming_from/")
    for block in page.blocks("diff")
}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("file", MIGRATED)
def test_a_migrated_script_trains_as_before(file, tmp_path):
    printed = {}
    for mark in "-+" if file == "from_torch.py" else "+":  # the others need packages
        (tmp_path / file).write_text(MIGRATED[file].side(mark))
        printed[mark] = run_on_ranks(2, tmp_path, file)
    losses = re.findall(r"^step \d  loss (\d\.\d+)$", printed["+"], re.MULTILINE)
    assert len(losses) == 5 and len({*losses}) > 3
    assert set(printed.values()) == {printed["+"]}
