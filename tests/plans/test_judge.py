"""The judge of plans shares no code with zbpp, and refuses what is wrong.

That it agrees about plans is part of the law of plans: `test_law`.
"""

import ast
import json
from pathlib import Path

import judge as module
import pytest
from judge import judge
from moe import moe_costs

from zbpp.core import schedule_text, write_costs
from zbpp.schedules import lay_out, plan_dual_pipe_v


def test_the_judge_imports_nothing_of_zbpp():
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    names = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None), *(x.name for x in node.names)]
    }
    assert not any(name and name.startswith("zbpp") for name in names)


def test_judge_refuses_broken_parts(tmp_path):
    costs = moe_costs(0.4)
    schedule = plan_dual_pipe_v(n_stages=2, n_microbatches=4)
    schedule = lay_out(schedule, costs.on(schedule.placement))
    write_costs(costs, tmp_path / "costs.json")
    data = json.loads((tmp_path / "costs.json").read_text())
    text = json.loads(schedule_text(schedule))
    judge(text, data)
    with pytest.raises(ValueError, match="over its limit"):
        judge(text, data | {"memory_limit": 2})
    text["parts"][0].remove("0F0.1~")
    with pytest.raises(ValueError, match="missing or twice"):
        judge(text, data)
    text["parts"][0].insert(1, "0F0.1")
    with pytest.raises(ValueError, match=r"cannot run 0F0\.1"):
        judge(text, data)


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
    with pytest.raises(ValueError, match="over its limit"):
        judge(file, {**costs, "memory_limit": 15.9})
    for key, value in {"m_b": 2, "m_w": 9, "m_fixed": 9, "peak_b": 3}.items():
        assert judge(file, {**costs, key: value}).peaks != [16]


@pytest.mark.slow
def test_random_cases_of_the_benchmark_are_planned(capsys):
    from random_cases import plans, random_cases  # of benchmarks/planner

    random_cases(8, "fast", seed=1)
    assert "mean gap" in capsys.readouterr().out
    found = plans(4, "fast", 1, None)
    assert found == plans(4, "fast", 1, None)
