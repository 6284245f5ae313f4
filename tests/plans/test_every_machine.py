"""The same plan on every machine: with the compiled loops and without them."""

import os
import subprocess
import sys

PLANS = """
from zbpp.core import Costs, Placement, schedule_text
from zbpp.planning import plan
from zbpp.schedules import plan_placement
pieces = [["compute", 1], ["network", 0.5]]
parts = {"f": pieces, "b": pieces[::-1], "w": [["compute", 1]]}
uneven = (1, 1.5, 0.5)
for mode, p, m, costs in (
    ("ZB", 3, 3, Costs(uneven, 1, 0.7, 0.2, send_occupies=0.1, memory_limit=2)),
    ("ZBV", 3, 4, Costs(uneven, 1, 0.7, 0.2, memory_limit=2)),
    ("ZB", 3, 4, Costs(w=uneven, m_w=1.3, peak_b=0.9, peak_w=0.1, memory_limit=4)),
    ("ZB", 1, 2, {"parts": parts, "memory_limit": 2}),
):
    sizes = {"n_stages": p, "n_microbatches": m}
    effort = "default" if m == 3 else "fast"
    print(schedule_text(plan(mode, **sizes, costs=costs, effort=effort)))
table = Costs(w=0.3, memory_limit=(3, 2, 2), splits=(True, False, True))
asked = {"placement": Placement((0, 1, 0, 2, 1)), "n_microbatches": 3}
print(schedule_text(plan_placement(**asked, costs=table, effort="fast")))
"""


def plans(**environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", PLANS],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


def test_plans_are_the_same_without_the_compiled_loops():
    assert plans(ZBPP_COMPILED="0") == plans() != ""
