"""Imports point down only: every import statement is parsed, none is run.

cli
training
emulation
pipeline                            planning, memory, profiling, tuning
schedules | simulator | runtime     the three never import one another
core                                the standard library
"""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

LAYERS = {
    "zbpp.core": {"zbpp.core"},
    "zbpp.schedules": {"zbpp.schedules", "zbpp.core"},
    "zbpp.simulator": {
        "zbpp.simulator",
        "zbpp.core",
        "matplotlib",
        "numpy",
        "rich",
    },
    "zbpp.runtime": {"zbpp.runtime", "zbpp.core", "torch"},
    "zbpp.memory": {
        "zbpp.memory",
        "zbpp.runtime",
        "zbpp.schedules",
        "zbpp.core",
        "torch",
        "zbpp.planning",
        "zbpp.models",
    },
}
"""The packages that a layer may import beside the standard library."""

ROOMS = {
    "zbpp.schedules.patterns": {"zbpp.schedules.patterns", "zbpp.core"},
    "zbpp.schedules.passes": {"zbpp.schedules.passes", "zbpp.core"},
    "zbpp.runtime.support": {"zbpp.runtime.support", "zbpp.core"},
    "zbpp.runtime.backward": {
        "zbpp.runtime.backward",
        "zbpp.runtime.support",
        "zbpp.runtime.compiled",
        "zbpp.core.RequestError",
    },
    "zbpp.runtime.compiled": {"zbpp.runtime.compiled", "zbpp.runtime.support"},
    "zbpp.runtime.comm": {
        "zbpp.runtime.comm",
        "zbpp.runtime.support",
        "zbpp.core",
        "zbpp.runtime.values",
        "zbpp.runtime.microbatches",
    },
    "zbpp.runtime.optim": {
        "zbpp.runtime.optim",
        "zbpp.runtime.support",
        "zbpp.core",
        "zbpp.runtime.comm.transport",
        "zbpp.runtime.comm.stage_group",
        "zbpp.runtime.stage",
        "zbpp.runtime.chunk",
        "zbpp.runtime.microbatches",
        "zbpp.runtime.policies",
    },
    "zbpp.runtime.parallel": {
        "zbpp.runtime.parallel",
        "zbpp.runtime.support",
        "zbpp.core",
        "zbpp.runtime.comm.stage_group",
        "zbpp.runtime.comm.process_group",
        "zbpp.runtime.comm.transport",
        "zbpp.runtime.chunk",
        "zbpp.runtime.backward.queue",
        "zbpp.runtime.policies",
    },
    "zbpp.checkpoint": {
        "zbpp.checkpoint",
        "zbpp.core",
        "zbpp.runtime.support.devices",
        "zbpp.runtime.support.sharded",
    },
    "zbpp.runtime.ties": {
        "zbpp.runtime.ties",
        "zbpp.runtime.support",
        "zbpp.core",
        "zbpp.runtime.chunk",
        "zbpp.runtime.values",
        "zbpp.runtime.comm.transport",
    },
    "zbpp.models": {"zbpp.models", "zbpp.runtime", "zbpp.core"},
    "zbpp.profiling": {
        "zbpp.profiling",
        "zbpp.runtime",
        "zbpp.memory",
        "zbpp.core",
        "zbpp.schedules",
        "zbpp.simulator",
    },
}
"""The parts of zbpp that a room may import."""

SEEDS = {
    "zbpp.schedules.planner.search.seeds",
    "zbpp.schedules.planner.lanes.plan",
}
"""The only parts of the planner that know patterns: they offer them as seeds."""

ONLY_IN = {
    "torch": {
        "zbpp.runtime",
        "zbpp.profiling",
        "zbpp.emulation",
        "zbpp.training",
        "zbpp.tuning.measure",
        "zbpp.pipeline",
        "zbpp.cli.doctor",
        "zbpp.models",
        "zbpp.checkpoint",
        "zbpp.bench",
        "zbpp.cli.split_report",
        "zbpp.cli.estimate",
        "zbpp.memory",
    },
    "transformers": {"zbpp.models"},
    "safetensors": {"zbpp.models", "zbpp.checkpoint"},
    "matplotlib": {"zbpp.simulator.plot", "zbpp.simulator.charts"},
    "cyclopts": {"zbpp.cli.parser"},
    "rich": {
        "zbpp.cli",
        "zbpp.training.log",
        "zbpp.bench.results",
        "zbpp.simulator.tables",
    },
}


def modules() -> Iterator[tuple[str, Path]]:
    for package in ("zbpp", "zbpp.schedules", "zbpp.simulator"):
        (root,) = importlib.import_module(package).__path__
        for path in sorted(Path(root).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__"), path


FILES = dict(modules())
HALLS = {
    name.rpartition(".")[0]
    for name, path in FILES.items()
    if path.name == "__init__.py"
}
"""Folders with rooms in them."""


@cache
def imports(source: str) -> list[str]:
    """Dotted names, down to the imported object."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides its layer"
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return names


def inside(name: str, packages: set[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in packages)


def breaches(module: str, source: str) -> list[str]:
    found = []
    for imported in imports(source):
        top = imported.partition(".")[0]
        for table in (LAYERS, ROOMS):
            home = next((name for name in table if inside(module, {name})), None)
            free = top in sys.stdlib_module_names or (table is ROOMS and top != "zbpp")
            if home is not None and not free and not inside(imported, table[home]):
                found.append(f"{module} imports {imported}, which {home} may not")
        if top in ONLY_IN and not inside(module, ONLY_IN[top]):
            found.append(f"{module} imports {imported}")
        if (
            inside(module, {"zbpp.schedules.planner"})
            and inside(imported, {"zbpp.schedules.patterns"})
            and module not in SEEDS
        ):
            found.append(f"{module} imports the pattern {imported}")
    return found


def circles(sources: dict[str, str], *, rooms: bool) -> list[list[str]]:
    """Circles of imports among modules, or among rooms.

    A room is a folder; files beside rooms are one each.
    """
    graph = nx.DiGraph()
    for module, source in sources.items():
        for imported in imports(source):
            known = imported if imported in sources else imported.rpartition(".")[0]
            if known in sources and known != module:
                ends = (room(module), room(known)) if rooms else (module, known)
                graph.add_edge(*ends)
    graph.remove_edges_from([(n, n) for n in graph.nodes if graph.has_edge(n, n)])
    return [sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1]


def room(module: str) -> str:
    if FILES[module].name == "__init__.py":
        return module
    return module if (above := module.rpartition(".")[0]) in HALLS else above


def sources() -> dict[str, str]:
    return {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}


def test_imports_point_down():
    every = [breach for pair in sources().items() for breach in breaches(*pair)]
    assert not every, "\n".join(every)


def test_no_modules_import_each_other_in_a_circle():
    assert not circles(sources(), rooms=False)


def test_no_rooms_import_each_other_in_a_circle():
    assert not circles(sources(), rooms=True)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("zbpp.core.jobs", "import numpy"),
        ("zbpp.core.jobs", "from zbpp.schedules import plan_vpp"),
        ("zbpp.core.jobs", "from zbpp import planning"),
        ("zbpp.schedules.patterns.vpp", "from zbpp.simulator import simulate"),
        ("zbpp.schedules.patterns.vpp", "from zbpp.schedules.planner import limits"),
        ("zbpp.schedules.passes.lower", "from zbpp.schedules import plan_zb_h1"),
        ("zbpp.schedules.planner.limits", "from zbpp.schedules.patterns import vpp"),
        ("zbpp.simulator.engine", "import zbpp.runtime.stage"),
        ("zbpp.runtime.stage", "from zbpp.planning import plan"),
        ("zbpp.runtime.stage", "def late():\n    from zbpp.schedules import lower"),
        ("zbpp.runtime.support.pytree", "import zbpp.runtime.stage"),
        ("zbpp.runtime.backward.split", "from zbpp.core import Pass"),
        ("zbpp.runtime.backward.split", "from zbpp.runtime.stage import Stage"),
        ("zbpp.runtime.comm.links", "import zbpp.runtime.optim.decision"),
        ("zbpp.runtime.optim.norms", "import zbpp.runtime.comm.mailbox"),
        ("zbpp.runtime.optim.norms", "from zbpp.runtime.backward.split import x"),
        ("zbpp.runtime.optim.norms", "from zbpp.runtime.executor import Executor"),
        ("zbpp.profiling.measure", "from zbpp.pipeline import Pipeline"),
        ("zbpp.checkpoint.state", "from zbpp.pipeline import Pipeline"),
        ("zbpp.checkpoint.state", "from zbpp.runtime.stage import Stage"),
        ("zbpp.planning.modes", "import torch.nn"),
        ("zbpp.planning.modes", "def late():\n    from torch import nn"),
        ("zbpp.simulator.trace", "def late():\n    import matplotlib"),
        ("zbpp.schedules.planner.limits", "import ortools"),
        ("zbpp.pipeline.pipeline", "from rich.table import Table"),
    ],
)
def test_an_import_that_breaks_a_rule_is_found(module, source):
    assert breaches(module, source)


@pytest.mark.parametrize(
    ("module", "line", "rooms"),
    [
        ("zbpp.core.jobs", "import zbpp.core.schedule", False),
        ("zbpp.runtime.stage", "from zbpp.runtime.executor import Executor", True),
        ("zbpp.training.setup", "from zbpp.cli.flags import CommonFlags", True),
    ],
)
def test_a_circle_is_found(module, line, rooms):
    broken = sources()
    broken[module] += f"\n{line}\n"
    assert circles(broken, rooms=rooms)


@pytest.mark.needs("matplotlib")
def test_planning_and_simulating_load_neither_torch_nor_matplotlib():
    code = (
        "import sys, zbpp, zbpp.schedules, zbpp.simulator, zbpp.runtime\n"
        "heavy = {'torch', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
    control = run(code.replace("import sys", "import sys, matplotlib"))
    assert "AssertionError: {'matplotlib'}" in control.stderr


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)
