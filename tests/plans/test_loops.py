"""The planner's loops in C: built by any compiler, and one line where there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zbpp.planning import plan

ROOT = Path(__file__).parents[2]
PLAN = "print(*zbpp.plan('ZBV', n_stages=2, n_microbatches=3).orders[0])"
HAND_MADE = "print(*zbpp.plan('1F1B', n_stages=2, n_microbatches=1).orders[0])"


@pytest.fixture
def checkout(tmp_path):
    """A copy of the sources, without the library."""
    unwanted = shutil.ignore_patterns("__pycache__", "*.shared")
    for source in ("src", "zbpp", "schedules", "simulator"):
        folder = tmp_path / source
        shutil.copytree(ROOT / source, folder, symlinks=True, ignore=unwanted)
    return tmp_path


def run(checkout, code, **environment):
    """The last line of a process that plans; a wrong request is printed."""
    lines = (
        "import zbpp",
        "try:",
        f"    {code}",
        "except zbpp.RequestError as error:",
        "    print(error)",
    )
    path = f"{checkout / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=checkout / "src",
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_without_a_compiler_hand_made_orders_work_and_planning_says_what_is_missing(
    checkout,
):
    text = run(checkout, PLAN, CC=shutil.which("false"))
    assert text.startswith("the planner's loops in C are not built (")
    assert "install a C compiler or ziglang" in text and "\n" not in text
    assert run(checkout, HAND_MADE, CC=shutil.which("false")) == "0F0 0BW0 O"
    assert not list(checkout.rglob("*.shared"))


@pytest.mark.needs("ziglang")
def test_ziglang_builds_the_loops_where_no_compiler_is_on_the_path(checkout):
    text = run(checkout, PLAN, PATH="", CC="cc")
    assert text == " ".join(
        map(str, plan("ZBV", n_stages=2, n_microbatches=3).orders[0])
    )


def test_changed_sources_are_built_again(checkout):
    before = run(checkout, PLAN)
    (loops,) = checkout.rglob("loops.shared")
    built = loops.read_bytes()
    with (loops.parent / "loops.h").open("a") as file:
        file.write("/* changed */\n")
    assert run(checkout, PLAN) == before
    assert loops.read_bytes() != built


SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all"
REQUESTS = """
import json, sys
from zbpp.core import Costs, Lane, Parts, read_costs
from zbpp.planning import plan
c, n = (Lane.COMPUTE, 0.5), (Lane.NETWORK, 0.3)
parts = Costs(parts=Parts((c, n, c, n), (n, c, n, c), (c, c), 2))
for mode in ("ZB", "ZBV", "ZBVPP"):
    plan(mode, n_stages=4, n_microbatches=8, costs=parts, effort="fast")
for row in json.load(open(sys.argv[1])):
    costs = read_costs(row["costs"])
    sizes = {"n_stages": row["p"], "n_microbatches": row["m"]}
    plan(row["mode"], **sizes, costs=costs, effort="fast")
print("done")
"""


@pytest.mark.nightly
def test_the_loops_stay_within_their_arrays(checkout):
    """The 242 requests and some with parts, under gcc's AddressSanitizer."""
    find = ["gcc", "-print-file-name=libasan.so"]
    asan = subprocess.run(find, capture_output=True, text=True).stdout.strip()
    environment = {
        "CC": f"gcc {SANITIZERS}",
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(checkout / "src"),
    }
    result = subprocess.run(
        [sys.executable, "-c", REQUESTS, str(Path(__file__).with_name("spans.json"))],
        cwd=checkout / "src",
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert result.stdout == "done\n", result.stderr
