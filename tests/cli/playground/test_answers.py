"""Answers of the playground are those of the command line, or say why there is none."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from zbpp.cli import main
from zbpp.cli.playground.answers import MOST_JOBS, answer, overview
from zbpp.planning import MODES

EVEN = {
    "stages": 4, "microbatches": 8, "f": 1, "b": 1, "w": 1, "comm": 0, "limit": 0,
    "speeds": [1, 1, 1, 1],
}  # fmt: skip


def asked(do, settings, *modes):
    question = {"do": do, "settings": settings, "modes": modes}
    return json.loads(answer(json.dumps(question)))


def random_settings(n: int, *, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Modes and settings; every third has a memory limit, every second equal stages."""
    rng, found = Random(seed), []
    for number in range(n):
        p = rng.randint(1, 8)
        times = {kind: round(rng.uniform(0.1, 4), 1) for kind in ("f", "b", "w")}
        speeds = [round(rng.uniform(0.5, 2), 2) for _ in range(p)]
        settings = {
            **times,
            "stages": p,
            "microbatches": rng.randint(1, 24),
            "comm": rng.choice([0, 0.05, 0.35, 1.2]),
            "limit": rng.choice([0.5, 2.5, 4, 7]) if number % 3 == 0 else 0,
            "speeds": speeds if number % 2 else [1] * p,
        }
        found.append((rng.choice(list(MODES)), settings))
    return found


def command_line(mode: str, settings: dict[str, Any], folder: Path) -> list[str]:
    """The words of ``zbpp plan`` for settings; costs and plan lie in the folder."""
    costs = {
        kind: [settings[kind] * speed for speed in settings["speeds"]]
        for kind in ("f", "b", "w")
    }
    text = json.dumps(costs | {"comm": settings["comm"]})
    (folder / "costs.json").write_text(text, encoding="utf-8")
    sizes = ["-p", str(settings["stages"]), "-m", str(settings["microbatches"])]
    words = ["plan", mode, *sizes, "--costs", str(folder / "costs.json")]
    if settings["limit"]:
        words += ["--memory_limit", str(settings["limit"])]
    return [*words, "--out", str(folder / "plan.json")]


def test_files_are_those_of_the_command_line(tmp_path, capsys):
    seen = []
    for mode, settings in random_settings(8, seed=1):
        found = asked("plan", settings, mode)
        words = command_line(mode, settings, tmp_path)
        seen.append("reason" in found)
        if seen[-1]:
            assert main(words) == 2
            assert found["reason"] in capsys.readouterr().err.replace("\n", " ")
        else:
            assert main(words) == 0
            file = (tmp_path / "plan.json").read_text()
            assert json.loads(found["file"]) == json.loads(file)  # 7 is 7.0
    assert set(seen) == {False, True}  # some fit, and some do not


def test_figures_are_those_of_show(tmp_path, capsys):
    found = asked("plan", EVEN, "ZBH1")
    flags = ["-p", "4", "-m", "8", "--json"]
    assert main(["show", "ZBH1", *flags]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert found["bubble"] == shown["bubble_rate"]
    assert found["peak"] == max(shown["peak_memory"])
    assert found["gap"] == shown["gap"]
    assert asked("plan", EVEN, "auto")["chosen"] == "ZBV"


def test_timelines_have_a_panel_a_mode():
    drawn = asked("draw", EVEN, "1F1B", "ZBV")
    assert re.findall(r"<h3>(.*?)</h3>", drawn["html"]) == ["1F1B", "ZBV"]
    first, second = drawn["data"]["panels"]
    assert (first["length"], second["length"]) == (33.0, 25.5)


def test_what_cannot_be_had_is_told():
    tight = EVEN | {"limit": 0.5}
    assert "smallest limit that works" in asked("plan", tight, "ZBV")["reason"]
    large = EVEN | {"microbatches": MOST_JOBS}
    assert "too many for a page" in asked("plan", large, "ZBV")["reason"]
    with pytest.raises(KeyError):
        answer('{"do": "plan", "modes": ["ZBV"]}')


def test_the_page_knows_every_mode():
    names = [one["name"] for one in json.loads(overview())]
    assert {"1F1B", "ZBV", "auto"} <= set(names)
