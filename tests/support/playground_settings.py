"""Settings of the playground at random, and the command line that repeats them."""

import json
from pathlib import Path
from random import Random
from typing import Any

from zbpp.planning import MODES


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
