"""A page for each public module, made of the docstrings of its names."""

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ABOUT = {
    "": "The names that most scripts need.",
    "averaging": "Replicas that are averaged every few steps.",
    "diagnostics": "Times, memory and split of the last steps of a pipeline.",
    "memory": "Memory of each stage in bytes, before anything runs.",
    "checkpoint": "Checkpoints without a pipeline.",
    "models": "Layers from a module, for `zbpp.Pipeline`.",
    "runtime": "The split backward alone, results of steps, and errors.",
    "simulator": "Timelines of a schedule, their figures and pictures.",
    "schedules": "Planners, and passes over schedules.",
    "planning": "Modes, requests and plans.",
    "profiling": "What `zbpp.diagnostics.profile` returns.",
    "tuning": "When a running pipeline is planned again.",
    "core": "Jobs, costs, schedules, timelines and files, without torch.",
}
"""Module below zbpp, and a line about it."""

FIRST = {
    "": {
        "Train": "Pipeline Numerics StepPolicy Execution",
        "Train on a mesh": "DataParallel Reduction TwoLevel TopK mesh deal",
        "Work with other trainers and layers": "overlap_point TorchSchedule",
        "Models": "cut layers_from",
        "Plan": "plan plan_model make_plan PlanRequest Plan read_plan Schedule",
        "Costs": "Costs",
        "Errors": "RequestError",
    },
}
"""Of a module with headings: its names below each of them."""

HIDDEN = {
    "memory": ["estimate.estimate"],
    "simulator": ["engine.critical_path", "plot.plot"],
}
"""Functions with the name of a submodule, by which mkdocstrings would take that."""


def page_text(room: str) -> str:
    """Write the page of a module."""
    module = f"zbpp.{room}".rstrip(".")
    parts = [f"# {module}\n\n{ABOUT[room]}\n"]
    if room not in FIRST:
        parts.append(f"\n::: {module}\n")
    parts += [_named(f"{module}.{name}", 2) for name in HIDDEN.get(room, ())]
    for heading, names in FIRST.get(room, {}).items():
        parts.append(f"\n## {heading}\n")
        parts += [_named(f"{module}.{name}", 3) for name in names.split()]
    return "".join(parts)


def _named(name: str, level: int) -> str:
    options = f"heading_level: {level}, show_root_heading: true"
    return f"\n::: {name}\n    options: {{{options}, show_root_toc_entry: true}}\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for room in ABOUT:
        path = f"reference/python/{room or 'zbpp'}.md"
        files.append(File.generated(config, path, content=page_text(room)))
    return files
