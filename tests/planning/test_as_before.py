"""The command line answers old requests, and reads old files, as it did at bd1de4c.

``as_before.json`` holds costs files, command lines, and what the code of that commit
wrote for them. Hand-made orders are equal to the byte; searches may find shorter plans.
"""

import json
from pathlib import Path

import pytest

from zbpp.cli import main

DATA = json.loads((Path(__file__).parents[1] / "data/as_before.json").read_text())
FIXED, PLANNED, REFUSED = (DATA[kind] for kind in ("fixed", "planned", "refused"))
PLANS = {**FIXED, **PLANNED}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in DATA["files"].items():
        Path(name).write_text(json.dumps(content))


def shown(capsys, *words: str) -> dict[str, object]:
    assert main(["show", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def assert_same(now: dict[str, object], before: dict[str, object]) -> None:
    """The same, but for the last bits of sums: Python 3.12 rounds them less."""
    assert list(now) == list(before)
    for key, value in before.items():
        is_sum = isinstance(value, float)
        expected = pytest.approx(value, rel=1e-12) if is_sum else value
        assert now[key] == expected, key


def plan(words: str) -> int:
    out = ("--out", "plan.json", "--csv", "plan.csv")
    return main(["plan", *words.split(), *out])


@pytest.mark.parametrize("name", FIXED)
def test_orders_that_depend_on_no_times_are_written_to_the_byte(name, capsys):
    before = FIXED[name]
    assert plan(before["words"]) == 0
    assert capsys.readouterr().out == before["said"]
    assert Path("plan.json").read_text() == before["plan"]
    assert Path("plan.csv").read_text() == before["csv"]
    assert_same(shown(capsys, *before["words"].split()), before["shown"])


@pytest.mark.parametrize("name", PLANNED)
def test_searched_plans_are_no_longer_and_say_the_same_things(name, capsys):
    before = PLANNED[name]
    now = shown(capsys, *before["words"].split())
    assert list(now) == list(before["shown"])
    assert now["span"] <= before["shown"]["span"] * (1 + 1e-9)
    assert plan(before["words"]) == 0
    assert list(json.loads(Path("plan.json").read_text())) == list(
        json.loads(before["plan"])
    )


@pytest.mark.parametrize("name", PLANS)
def test_old_schedule_files_read_as_before(name, capsys):
    before = PLANS[name]
    Path("old.json").write_text(before["plan"])
    words = before["words"].split()
    at = words.index("--costs") if "--costs" in words else len(words)
    assert_same(shown(capsys, "old.json", *words[at : at + 2]), before["read"])
    assert main(["plan", "old.json", "--out", "again.json"]) == 0
    assert Path("again.json").read_text() == before["plan"]


@pytest.mark.parametrize("name", REFUSED)
def test_requests_are_refused_in_the_same_words(name, capsys):
    before = REFUSED[name]
    assert plan(before["words"]) == before["code"]
    assert capsys.readouterr().err == before["error"]
