"""The judge of the benchmarks shares no code with zbpp, and agrees with it."""

import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from zbpp.core import Costs, MemoryModel, peaks, schedule_text
from zbpp.modes import plan
from zbpp.simulator import simulate, span

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


JUDGE = load("judge")


def case(seed: int) -> tuple[str, dict[str, Any], int, int]:
    """A mode, a costs file, stages and micro-batches."""
    rng = random.Random(seed)
    p, m, chunks = rng.randint(1, 5), rng.randint(1, 8), rng.choice((1, 2))
    costs: dict[str, Any] = {
        key: [rng.uniform(0.3, 1.5) for _ in range(p * chunks)] for key in "fbw"
    }
    costs["comm"] = [rng.choice((0.0, 0.3)) for _ in range(p - 1)] or 0.1
    costs["loss"] = rng.choice((0.0, 0.5))
    costs["splits"] = [rng.random() < 0.8 for _ in range(p)]
    costs["m_b"], costs["m_w"] = 1.0, rng.choice((0.0, 0.4, 1.0))
    costs["memory_limit"] = [rng.choice((1.0, 1.5, 3.0)) for _ in range(p)]
    return ("ZB" if chunks == 1 else "ZBV"), costs, p, m


def models(costs: dict[str, Any]) -> tuple[Costs, MemoryModel]:
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in costs.items()}
    times = {k: given[k] for k in ("f", "b", "w", "comm", "loss", "splits")}
    return Costs(**times), MemoryModel(
        given["m_b"], given["m_w"], given["memory_limit"]
    )


def planned(seed: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    mode, costs, p, m = case(seed)
    times, memory = models(costs)
    schedule = plan(
        mode, n_stages=p, n_microbatches=m, costs=times, memory=memory, effort="fast"
    )
    return json.loads(schedule_text(schedule)), costs, p


@pytest.mark.parametrize("seed", range(30))
def test_judge_and_simulator_agree(seed):
    mode, costs, p, m = case(seed)
    times, memory = models(costs)
    schedule = plan(
        mode, n_stages=p, n_microbatches=m, costs=times, memory=memory, effort="fast"
    )
    verdict = JUDGE.judge(json.loads(schedule_text(schedule)), costs)
    assert verdict.span == pytest.approx(span(simulate(schedule, times)), rel=1e-12)
    held = memory.on(schedule.placement, times.on(schedule.placement).splits)
    assert verdict.peaks == pytest.approx(peaks(schedule.orders, held))


@pytest.mark.parametrize("seed", range(30))
def test_judge_refuses_broken_files(seed):
    file, costs, p = planned(seed)
    rng = random.Random(seed)
    row = file["jobs"][rng.randrange(p)]
    lost = row.pop(rng.randrange(len(row) - 1))
    with pytest.raises(ValueError, match="every pass"):
        JUDGE.judge(file, costs)
    row.append(lost)
    row.append(lost)
    with pytest.raises(ValueError, match="every pass"):
        JUDGE.judge(file, costs)
    file, costs, p = planned(seed)
    file["jobs"][0].reverse()
    with pytest.raises(ValueError, match=r"waits for ever|over its limit"):
        JUDGE.judge(file, costs)
    file, costs, p = planned(seed)
    with pytest.raises(ValueError, match="over its limit"):
        JUDGE.judge(file, {**costs, "memory_limit": 0.99})


def test_judge_refuses_a_split_that_cannot_be():
    file = {
        "placement": [0],
        "n_microbatches": 1,
        "jobs": [["0F0", "0B0", "0W0", "O"]],
    }
    JUDGE.judge(file, {})
    with pytest.raises(ValueError, match="cannot"):
        JUDGE.judge(file, {"splits": [False]})


def test_random_cases_of_the_benchmark_are_planned(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = load("planner_random")
    module.random_cases(25, "fast", seed=1)
    assert "mean gap" in capsys.readouterr().out
    for name in ("judge", "planner"):
        sys.modules.pop(name, None)
