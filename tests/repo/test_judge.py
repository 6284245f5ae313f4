"""The judge of plans shares no code with zbpp, and agrees with it."""

import json
import random
from typing import Any

import pytest
from judge import judge

from zbpp.core import Costs, Schedule, peaks, schedule_text
from zbpp.planning import plan
from zbpp.simulator import simulate, span


def case(seed: int) -> tuple[str, dict[str, Any], int, int]:
    """A mode, a costs file, stages and micro-batches."""
    rng = random.Random(seed)
    p, m, chunks = rng.randint(1, 5), rng.randint(1, 8), rng.choice((1, 2))
    costs: dict[str, Any] = {
        key: [rng.uniform(0.3, 1.5) for _ in range(p * chunks)] for key in "fbw"
    }
    costs["comm"] = [rng.choice((0.0, 0.3)) for _ in range(p - 1)] or 0.1
    costs["loss"] = rng.choice((0.0, 0.5))
    if seed % 3 == 0:
        costs["send_occupies"] = rng.choice((0.1, 0.5))
    costs["splits"] = [rng.random() < 0.8 for _ in range(p)]
    costs["m_b"], costs["m_w"] = 1.0, rng.choice((0.0, 0.4, 1.0))
    costs["memory_limit"] = [rng.choice((1.0, 1.5, 3.0)) for _ in range(p)]
    if seed % 2:
        costs |= true_memory(rng, p, p * chunks)
    return ("ZB" if chunks == 1 else "ZBV"), costs, p, m


def true_memory(rng: random.Random, p: int, n: int) -> dict[str, Any]:
    """Peaks, what is fixed, B's that add memory; limits with room for all of it."""
    m_b = [rng.uniform(0.2, 1.0) for _ in range(n)]
    m_w = [one * rng.choice((0.5, 1.0, 3.0)) for one in m_b]
    both = list(zip(m_b, m_w, strict=True))
    return {
        "m_b": m_b,
        "m_w": m_w,
        "m_fixed": [rng.uniform(0.0, 9.0) for _ in range(p)],
        "peak_f": [b * rng.choice((1.0, 2.0)) for b in m_b],
        "peak_b": [max(0.0, w - b) + rng.choice((0.0, 1.0)) for b, w in both],
        "peak_w": rng.choice((0.0, 0.7)),
        "peak_o": rng.choice((0.0, 20.0)),
        "memory_limit": [rng.choice((30.0, 33.0)) for _ in range(p)],
    }


def models(costs: dict[str, Any]) -> tuple[Costs, Costs]:
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in costs.items()}
    names = ("f", "b", "w", "comm", "loss", "splits", "send_occupies")
    times = {k: given.pop(k) for k in names if k in given}
    return Costs(**times), Costs(memory_limit=given.pop("memory_limit"), **given)


def planned(seed: int) -> tuple[Schedule, dict[str, Any]]:
    mode, costs, p, m = case(seed)
    times, memory = models(costs)
    schedule = plan(
        mode,
        n_stages=p,
        n_microbatches=m,
        costs=times.with_memory(memory),
        effort="fast",
    )
    return schedule, costs


@pytest.mark.parametrize("seed", range(16))
def test_judge_and_simulator_agree(seed):
    schedule, costs = planned(seed)
    times, memory = models(costs)
    verdict = judge(json.loads(schedule_text(schedule)), costs)
    assert verdict.span == pytest.approx(span(simulate(schedule, times)), rel=1e-12)
    held = memory.on(schedule.placement)
    assert verdict.peaks == pytest.approx(peaks(schedule.orders, held))


@pytest.mark.parametrize("seed", range(8))
def test_judge_refuses_broken_files(seed):
    schedule, costs = planned(seed)
    text, rng = schedule_text(schedule), random.Random(seed)
    file = json.loads(text)
    row = rng.choice(file["jobs"])
    lost = row.pop(rng.randrange(len(row) - 1))
    with pytest.raises(ValueError, match="every pass"):
        judge(file, costs)
    row += [lost, lost]
    with pytest.raises(ValueError, match="every pass"):
        judge(file, costs)
    file = json.loads(text)
    file["jobs"][0].reverse()
    with pytest.raises(ValueError, match=r"waits for ever|over its limit"):
        judge(file, costs)
    with pytest.raises(ValueError, match="over its limit"):
        judge(json.loads(text), {**costs, "memory_limit": 0.99})


def test_judge_refuses_a_split_that_cannot_be():
    file = {
        "placement": [0],
        "n_microbatches": 1,
        "jobs": [["0F0", "0B0", "0W0", "O"]],
    }
    judge(file, {})
    with pytest.raises(ValueError, match="cannot"):
        judge(file, {"splits": [False]})


def test_judge_adds_up_memory_as_drawn_by_hand():
    """One stage: F leaves 1; B 3 in its place, 4 inside; W .5 inside; O 6.

    order   F0 F1 B0 W0 B1 W1  O       above 10
    held     1  2  6 4.5 5 3.5 6
    """
    row = ["0F0", "0F1", "0B0", "0W0", "0B1", "0W1", "O"]
    file = {"placement": [0], "n_microbatches": 2, "jobs": [row]}
    costs = {"m_b": 1, "m_w": 3, "m_fixed": 10, "peak_b": 4, "peak_w": 0.5}
    assert judge(file, {**costs, "memory_limit": 16}).peaks == [16]
    assert judge(file, {**costs, "peak_o": 7}).peaks == [17]
    assert judge(file, {**costs, "m_fixed": "1 KiB"}).peaks == [1030]
    with pytest.raises(ValueError, match="over its limit"):
        judge(file, {**costs, "memory_limit": 15.9})
    for key, value in {"m_b": 2, "m_w": 9, "m_fixed": 9, "peak_b": 3}.items():
        assert judge(file, {**costs, key: value}).peaks != [16]


def test_judge_refuses_plans_that_look_past_the_true_memory():
    """Negative control: a plan without peaks, judged with them."""
    plain = plan("ZB", n_stages=3, n_microbatches=6, memory_limit=3)
    file = json.loads(schedule_text(plain))
    judge(file, {"memory_limit": 3})
    for key in ("m_fixed", "peak_b", "peak_f", "m_w"):
        with pytest.raises(ValueError, match="over its limit"):
            judge(file, {"memory_limit": 3, key: 2.5})


@pytest.mark.slow
def test_random_cases_of_the_benchmark_are_planned(capsys):
    from random_cases import plans, random_cases  # of benchmarks/planner

    random_cases(8, "fast", seed=1)
    assert "mean gap" in capsys.readouterr().out
    found = plans(4, "fast", 1, None)
    assert found == plans(4, "fast", 1, None)
