"""Figures of a bench: as JSON, as a table, as a page, and as a trace of ours."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from zbpp.bench.ours import Jobs
from zbpp.bench.setting import Setting
from zbpp.core import RequestError, format_bytes
from zbpp.profiling.means import spread
from zbpp.runtime.support.devices import device_name, runs_ahead
from zbpp.simulator import Table, write_page, write_trace

_WIDTH = 150


@dataclass(frozen=True)
class Turn:
    """Figures of one contender's turn, the same in all processes.

    Args:
        steps_s: seconds of each step.
        peak_bytes: of each process by torch's allocator; None on CPUs.
        host_s: CPU seconds of each process's main thread for a job.
    """

    steps_s: tuple[float, ...]
    peak_bytes: tuple[int | None, ...]
    host_s: tuple[float, ...]


@dataclass
class Outcome:
    """The findings about one contender.

    Args:
        name: of the contender.
        reason: why it was not timed; empty: it was.
        turns: of its steps.
        jobs: of the last steps, for modes of ours; in ms.
    """

    name: str
    reason: str = ""
    turns: list[Turn] = field(default_factory=list)
    jobs: Jobs | None = None


def write_results(setting: Setting, outcomes: Sequence[Outcome]) -> None:
    """Write results.json, index.html and trace.json; print the table."""
    options, plan = setting.options, setting.plan
    rows = [_row(setting, outcome) for outcome in outcomes]
    data = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "hardware": _hardware(setting.device),
        "versions": _versions(),
        "command": plan.command,
        "n_stages": plan.n_stages,
        "n_microbatches": options.microbatches,
        "emulated": plan.costs is not None,
        "contenders": rows,
    }
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        file = options.out / "results.json"
        file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"--out {options.out} cannot be written: {error.strerror}"
        ) from None
    files = [file, options.out / "index.html"]
    table = _table(setting, rows)
    jobs = [x.jobs for x in outcomes if x.jobs is not None]
    write_page(
        [
            replace(timeline, name=f"{x.name}, {kind}")
            for x in jobs
            for kind, timeline in (("simulated", x.simulated), ("measured", x.measured))
        ],
        files[-1],
        costs=[x.costs for x in jobs for _ in range(2)],
        above=[table.html()],
        title=_title(setting),
        subtitle=f"{data['date']}; {data['hardware']}; {data['versions']}",
        command=plan.command,
        time_unit="ms",
    )
    if jobs:
        files.append(options.out / "trace.json")
        write_trace([replace(x.measured, name=x.name) for x in jobs], files[-1])
    Console(highlight=False, width=_WIDTH).print(table.for_terminal())
    print(*files, sep="\n", flush=True)


def _row(setting: Setting, outcome: Outcome) -> dict[str, Any]:
    """The figures of one contender, for JSON."""
    sleeps, batch = setting.plan.costs is not None, setting.batch
    turns = outcome.turns
    row: dict[str, Any] = {
        "name": outcome.name,
        "same_loss": None if sleeps else not outcome.reason,
    }
    if outcome.reason:
        return row | {"reason": outcome.reason}
    steps = [step for turn in turns for step in turn.steps_s]
    low, step, high, _ = spread(steps)
    peaks = zip(*(turn.peak_bytes for turn in turns), strict=True)
    host_s = statistics.median(max(turn.host_s) for turn in turns)
    row |= {
        "step_s": step,
        "quartiles_s": [low, high],
        "steps_s": steps,
        "tokens_per_s": batch.tokens / step if batch.tokens else None,
        "samples_per_s": None if sleeps else batch.samples / step,
        "peak_bytes": [None if None in x else max(x) for x in peaks],
        "host_us_per_job": None if sleeps else 1e6 * host_s,
    }
    if outcome.jobs is not None:
        row |= {
            "bubble_measured": outcome.jobs.bubble,
            "predicted_step_s": outcome.jobs.step / 1e3,
        }
    return row


def _table(setting: Setting, rows: Sequence[dict[str, Any]]) -> Table:
    cells = [_cells(row, rows[0]) for row in rows]
    heads = list(dict.fromkeys(head for row in cells for head in row))
    table = Table(["contender", *heads], title=_title(setting))
    for row, texts in zip(rows, cells, strict=True):
        others = [texts.get(head, "") for head in heads] if texts else [row["reason"]]
        table.add(row["name"], *others)
    return table


def _cells(row: dict[str, Any], first: dict[str, Any]) -> dict[str, str]:
    """Texts of the table by the heads of their columns; none for what was refused."""
    if "step_s" not in row:
        return {}
    cells = {"step, ms": f"{1e3 * row['step_s']:.4g}", "speed-up": ""}
    if "step_s" in first:
        cells["speed-up"] = f"{first['step_s'] / row['step_s']:.3f}"
    if "predicted_step_s" in row:
        cells["predicted"] = f"{1e3 * row['predicted_step_s']:.4g}"
        cells["bubble"] = f"{row['bubble_measured']:.1%}"
    low, high = row["quartiles_s"]
    cells["quartiles, ms"] = f"{1e3 * low:.3g}-{1e3 * high:.3g}"
    if None not in row["peak_bytes"]:
        cells["peak of a process"] = format_bytes(max(row["peak_bytes"]))
    unit = "tokens" if row["tokens_per_s"] else "samples"
    if per_s := row[f"{unit}_per_s"]:
        cells[f"{unit}/s"] = f"{per_s:,.0f}"
    if row["host_us_per_job"] is not None:
        cells["host, us/job"] = f"{row['host_us_per_job']:.0f}"
    return cells


def _title(setting: Setting) -> str:
    options, plan = setting.options, setting.plan
    what = f"{plan.n_stages} stages, {options.microbatches} micro-batches"
    if plan.costs is not None:
        what += ", layers that sleep"
    turns = f"{options.rounds} turns of {options.steps_a_turn} steps"
    return f"{what}, {turns}, {dist.get_backend()}"


def _hardware(device: torch.device) -> str:
    if runs_ahead(device):
        return f"{torch.accelerator.device_count()} x {device_name(device)} a machine"
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    return f"{platform.machine()} CPU, {cores} cores"


def _versions() -> str:
    try:
        release = version("zbpp")
    except PackageNotFoundError:
        release = "of a checkout"
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    return (
        f"zbpp {release}, torch {torch.__version__}{cuda}, "
        f"Python {platform.python_version()}"
    )
