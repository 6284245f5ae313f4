"""Figures of a bench: as JSON, as a table, as a page, and as a trace of ours."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from zbpp.bench.contender import Setting
from zbpp.bench.names import OURS, split_name
from zbpp.bench.ours import Jobs
from zbpp.bench.turns import Turn
from zbpp.core import RequestError, format_bytes
from zbpp.runtime.support.devices import device_name, runs_ahead
from zbpp.simulator import PageEntry, write_page, write_trace
from zbpp.simulator.tables import Table

__all__ = ["Outcome", "write_results"]

_WIDTH = 150


@dataclass(frozen=True)
class Outcome:
    """The findings about one contender.

    Args:
        name: of the contender.
        reason: why it was not timed; empty: it was.
        turns: of its steps.
        jobs: of the last steps, for modes of ours.
    """

    name: str
    reason: str
    turns: tuple[Turn, ...]
    jobs: Jobs | None = None

    @property
    def title(self) -> str:
        """Its mode, if it is ours, else the whole name."""
        whose, name = split_name(self.name)
        return name if whose == OURS else self.name

    @property
    def steps_s(self) -> list[float]:
        """Seconds of all steps that count."""
        return [step for turn in self.turns for step in turn.steps_s]

    @property
    def step_s(self) -> float:
        """Median of the steps."""
        return statistics.median(self.steps_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Lower and upper quartile of the steps."""
        steps = self.steps_s
        if len(steps) < 2:
            return steps[0], steps[0]
        low, _, high = statistics.quantiles(steps, method="inclusive")
        return low, high

    @property
    def peak_bytes(self) -> list[int | None]:
        """Largest memory of each process in any turn."""
        by_process = zip(*(turn.peak_bytes for turn in self.turns), strict=True)
        return [
            None if None in peaks else max(peak for peak in peaks if peak is not None)
            for peaks in by_process
        ]

    @property
    def host_us(self) -> float:
        """Median over turns of the CPU time of a job, on the process that has most."""
        return 1e6 * statistics.median(max(turn.host_s) for turn in self.turns)


def write_results(setting: Setting, outcomes: Sequence[Outcome]) -> None:
    """Write results.json, index.html and trace.json; print the table, or JSON."""
    request = setting.request
    data = _data(setting, outcomes)
    try:
        request.out.mkdir(parents=True, exist_ok=True)
        file = request.out / "results.json"
        file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"--out {request.out} cannot be written: {error.strerror}"
        ) from None
    files = [file, request.out / "index.html"]
    timed = [one for one in outcomes if one.jobs]
    fastest = min(timed, key=lambda one: one.step_s, default=None)
    write_page(
        [_entry(setting, o, shown=o in (outcomes[0], fastest)) for o in outcomes],
        files[-1],
        title=_title(setting),
        subtitle=f"{data['date']}; {data['hardware']}; {data['versions']}",
        command=request.command,
        time_unit="ms",
    )
    if timed:
        files.append(request.out / "trace.json")
        lines = [(one.title, one.jobs.measured) for one in timed if one.jobs]
        write_trace([replace(line, name=name) for name, line in lines], files[-1])
    if request.json:
        print(json.dumps(data), flush=True)
        return
    table = _table(setting, outcomes).for_terminal()
    Console(highlight=False, width=_WIDTH).print(table)
    print(*files, sep="\n", flush=True)


def _data(setting: Setting, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    request = setting.request
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "hardware": _hardware(setting.device),
        "versions": _versions(),
        "command": request.command,
        "n_stages": request.stages,
        "n_microbatches": request.microbatches,
        "emulated": request.emulate is not None,
        "contenders": [_contender(setting, outcome) for outcome in outcomes],
    }


def _contender(setting: Setting, outcome: Outcome) -> dict[str, Any]:
    emulated, batch = setting.request.emulate is not None, setting.batch
    data: dict[str, Any] = {
        "name": outcome.name,
        "same_loss": None if emulated else not outcome.reason,
    }
    if outcome.reason:
        return data | {"reason": outcome.reason}
    step = outcome.step_s
    data |= {
        "step_s": step,
        "quartiles_s": list(outcome.quartiles_s),
        "steps_s": outcome.steps_s,
        "tokens_per_s": batch.tokens / step if batch.tokens else None,
        "samples_per_s": None if emulated else batch.samples / step,
        "peak_bytes": outcome.peak_bytes,
        "host_us_per_job": None if emulated else outcome.host_us,
    }
    if outcome.jobs is not None:
        data |= {
            "bubble_measured": outcome.jobs.bubble,
            "predicted_step_s": outcome.jobs.predicted_step / 1e3,
        }
    return data


def _table(setting: Setting, outcomes: Sequence[Outcome]) -> Table:
    first, heads = outcomes[0], ["step, ms", "speed-up", "predicted", "bubble"]
    figures = {one.name: _figures(setting, one) for one in outcomes if one.turns}
    heads += list(next(iter(figures.values()), ()))
    table = Table(["contender", *heads], title=_title(setting))
    for outcome in outcomes:
        if not outcome.turns:
            table.add(outcome.name, outcome.reason)
            continue
        jobs, step = outcome.jobs, outcome.step_s
        table.add(
            outcome.name,
            f"{1e3 * step:.4g}",
            f"{first.step_s / step:.3f}" if first.turns else "",
            f"{jobs.predicted_step:.4g}" if jobs else "",
            f"{jobs.bubble:.1%}" if jobs else "",
            *figures[outcome.name].values(),
        )
    return table


def _figures(setting: Setting, outcome: Outcome) -> dict[str, str]:
    """Figures of the table and of the page, by the heads of their columns."""
    (low, high), batch = outcome.quartiles_s, setting.batch
    peaks = [peak for peak in outcome.peak_bytes if peak is not None]
    figures = {
        "quartiles, ms": f"{1e3 * low:.3g}-{1e3 * high:.3g}",
        "peak of a process": format_bytes(max(peaks)) if peaks else "",
    }
    if setting.request.emulate is None:
        unit, n = "tokens/s", batch.tokens
        if n is None:
            unit, n = "samples/s", batch.samples
        figures[unit] = f"{n / outcome.step_s:,.0f}"
        figures["host, us/job"] = f"{outcome.host_us:.0f}"
    return figures


def _entry(setting: Setting, outcome: Outcome, *, shown: bool) -> PageEntry:
    """A row of the page; its timelines if it is one of ours."""
    if not outcome.turns:
        return PageEntry(name=outcome.title, reason=outcome.reason)
    entry = PageEntry(
        name=outcome.title,
        step_measured=1e3 * outcome.step_s,
        figures=_figures(setting, outcome),
        shown=shown,
    )
    if (jobs := outcome.jobs) is None:
        return entry
    return replace(
        entry,
        schedule=jobs.schedule,
        costs=jobs.costs,
        simulated=jobs.simulated,
        step=jobs.predicted_step,
        measured=jobs.measured,
        bubble_measured=jobs.bubble,
    )


def _title(setting: Setting) -> str:
    request = setting.request
    what = f"{request.stages} stages, {request.microbatches} micro-batches"
    if request.emulate is not None:
        what += f", layers that sleep ({request.emulate.name})"
    turns = f"{request.rounds} turns of {request.steps_a_turn} steps"
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
