"""Figures of a bench: as JSON, as a table, and as a page."""

import json
import os
import platform
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from zbpp.bench.contender import Field, Measured
from zbpp.bench.names import OURS, split_name
from zbpp.bench.ours import Promised
from zbpp.bench.turns import Turn
from zbpp.core import Costs, RequestError, Timeline, format_bytes
from zbpp.runtime.support.devices import device_name, runs_ahead
from zbpp.simulator import write_trace
from zbpp.simulator.page import PageEntry, write_page
from zbpp.simulator.tables import Table

__all__ = ["Outcome", "write_results"]

_WIDTH = 150


@dataclass(frozen=True)
class Outcome:
    """The findings about one contender.

    Args:
        name: of the contender.
        difference: of its gradients, 0.0 for the same bits; None: nothing was compared.
        turns: without any it was not timed.
        measured: its jobs, where they can be told.
        promised: the same jobs by the simulator, for modes of ours.
    """

    name: str
    difference: float | None
    turns: tuple[Turn, ...]
    measured: Measured | None = None
    promised: Promised | None = None

    def is_wrong(self, tolerance: float) -> bool:
        """True if its gradients are further off than that."""
        return self.difference is not None and not self.difference <= tolerance

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

    def gradients(self, tolerance: float) -> str:
        """One word or two on the gradients."""
        if self.difference is None:
            return ""
        if self.difference == 0:
            return "same bits"
        off = f"off by {self.difference:.1e}"
        return f"refused: {off}" if self.is_wrong(tolerance) else off


def write_results(field: Field, outcomes: Sequence[Outcome]) -> None:
    """Write results.json, index.html and trace.json; print the table, or JSON."""
    request = field.request
    data = _data(field, outcomes)
    try:
        request.out.mkdir(parents=True, exist_ok=True)
        file = request.out / "results.json"
        file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"--out {request.out} cannot be written: {error.strerror}"
        ) from None
    page = request.out / "index.html"
    shown = {outcomes[0].name} | _fastest(outcomes)
    write_page(
        [_entry(field, outcome, shown) for outcome in outcomes],
        page,
        title=_title(field),
        subtitle=f"{data['date']}; {data['hardware']}; {data['versions']}",
        command=request.command,
        time_unit="ms",
    )
    trace = request.out / "trace.json"
    runs = [run for outcome in outcomes for run in _runs(outcome)]
    if runs:
        lines, costs = zip(*runs, strict=True)
        write_trace(lines, trace, costs=costs)
    if request.json:
        print(json.dumps(data), flush=True)
        return
    console = Console(highlight=False, width=_WIDTH)
    console.print(_table(field, outcomes).for_terminal())
    print(file, page, *([trace] if runs else []), sep="\n", flush=True)


def _fastest(outcomes: Sequence[Outcome]) -> set[str]:
    """The fastest mode of ours, and the fastest of the others."""
    fastest: dict[str, Outcome] = {}
    for outcome in outcomes:
        whose, _ = split_name(outcome.name)
        if outcome.turns and (
            whose not in fastest or outcome.step_s < fastest[whose].step_s
        ):
            fastest[whose] = outcome
    return {outcome.name for outcome in fastest.values()}


def _runs(outcome: Outcome) -> list[tuple[Timeline, Costs | None]]:
    """Plan of a contender, if it is ours, and what it did; with its costs."""
    name, promised = _title_of(outcome), outcome.promised
    costs = promised.costs if promised else None
    both = {
        "simulated": promised.simulated if promised else None,
        "measured": outcome.measured.timeline if outcome.measured else None,
    }
    return [
        (replace(line, name=f"{name}, {how}"), costs)
        for how, line in both.items()
        if line is not None
    ]


def _title_of(outcome: Outcome) -> str:
    whose, name = split_name(outcome.name)
    return name if whose == OURS else outcome.name


def _data(field: Field, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    request = field.request
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "hardware": _hardware(field.device),
        "versions": _versions(),
        "command": request.command,
        "n_stages": request.stages,
        "n_microbatches": request.microbatches,
        "emulated": request.emulate is not None,
        "reference": None if request.emulate else _reference(field, outcomes),
        "contenders": [_contender(field, outcome) for outcome in outcomes],
    }


def _contender(field: Field, outcome: Outcome) -> dict[str, Any]:
    request = field.request
    wrong = outcome.is_wrong(request.tolerance)
    data: dict[str, Any] = {
        "name": outcome.name,
        "same_gradients": None if outcome.difference is None else not wrong,
        "gradient_difference": outcome.difference,
    }
    if not outcome.turns:
        return data | {"reason": outcome.gradients(request.tolerance)}
    rates = _rates(field, outcome)
    data |= {
        "step_s": outcome.step_s,
        "quartiles_s": list(outcome.quartiles_s),
        "steps_s": outcome.steps_s,
        "tokens_per_s": rates.get("tokens/s"),
        "samples_per_s": rates.get("samples/s"),
        "peak_bytes": outcome.peak_bytes,
        "host_us_per_job": None if request.emulate else outcome.host_us,
    }
    if outcome.measured is not None:
        data |= {
            "bubble_measured": outcome.measured.bubble,
            "bubble_by_stage": list(outcome.measured.bubble_by_stage),
            "clock_error_s": outcome.measured.timeline.clock_error / 1e3,
        }
    if outcome.promised is not None:
        data |= {
            "predicted_step_s": outcome.promised.predicted_step / 1e3,
            "predicted_with": "given costs"
            if outcome.promised.has_given_costs
            else "costs of the same steps",
            "measured_over_simulated": _by_kind(_entry(field, outcome)),
            "errors_ms": {
                kind: {"time": time, "start": start}
                for kind, (time, start) in _entry(field, outcome)
                .errors_by_kind()
                .items()
            },
        }
    return data


def _rates(field: Field, outcome: Outcome) -> dict[str, float]:
    if field.request.emulate is not None:
        return {}
    batch = field.batch
    rates = {"samples/s": batch.samples / outcome.step_s}
    if batch.tokens is not None:
        rates["tokens/s"] = batch.tokens / outcome.step_s
    return rates


def _by_kind(entry: PageEntry) -> dict[str, float]:
    """For each kind of job its measured time over the simulated one."""
    return {
        kind: measured / simulated
        for kind, (simulated, measured) in entry.times_by_kind().items()
    }


def _entry(field: Field, outcome: Outcome, shown: Collection[str] = ()) -> PageEntry:
    title = _title_of(outcome)
    if not outcome.turns:
        return PageEntry(name=title, reason=outcome.gradients(field.request.tolerance))
    low, high = outcome.quartiles_s
    rates = _rates(field, outcome)
    figures: dict[str, float | str] = {
        "quartiles, ms": f"{1e3 * low:.4g} to {1e3 * high:.4g}",
        **{rate: float(f"{v:.5g}") for rate, v in list(rates.items())[-1:]},
    }
    if (peak := _peak(outcome)) is not None:
        figures["peak memory of a process"] = format_bytes(peak)
    if not field.request.emulate:
        figures["host, \N{MICRO SIGN}s a job"] = float(f"{outcome.host_us:.3g}")
        figures["gradients"] = outcome.gradients(field.request.tolerance)
    entry = PageEntry(
        name=title,
        measured=outcome.measured.timeline if outcome.measured else None,
        step_measured=1e3 * outcome.step_s,
        bubble_measured=outcome.measured.bubble if outcome.measured else None,
        figures=figures,
        shown=outcome.name in shown,
    )
    promised = outcome.promised
    if promised is None:
        return entry
    return replace(
        entry,
        schedule=promised.schedule,
        simulated=promised.simulated,
        costs=promised.costs,
        step=promised.predicted_step,
    )


def _table(field: Field, outcomes: Sequence[Outcome]) -> Table:
    request = field.request
    first = outcomes[0]
    heads = ["contender", "step, ms", "quartiles", "speed-up"]
    unit = "tokens/s" if field.batch.tokens is not None else "samples/s"
    heads += ["predicted", "bubble", "by stage, %", "peak memory"]
    heads[4:4] = [] if request.emulate else [unit]
    heads += [] if request.emulate else ["host, us/job", "gradients"]
    table = Table(heads, title=_title(field))
    for outcome in outcomes:
        if not outcome.turns:
            table.add(outcome.name, outcome.gradients(request.tolerance))
            continue
        low, high = outcome.quartiles_s
        seen, promised, peak = outcome.measured, outcome.promised, _peak(outcome)
        cells = [
            outcome.name,
            f"{1e3 * outcome.step_s:.4g}",
            f"{1e3 * low:.3g}-{1e3 * high:.3g}",
            f"{first.step_s / outcome.step_s:.3f}" if first.turns else "",
            *([] if request.emulate else [f"{_rates(field, outcome)[unit]:,.0f}"]),
            "" if promised is None else f"{promised.predicted_step:.4g}",
            "" if seen is None else f"{seen.bubble:.1%}",
            ""
            if seen is None
            else " ".join(f"{100 * x:.1f}" for x in seen.bubble_by_stage),
            "" if peak is None else format_bytes(peak),
        ]
        if not request.emulate:
            cells += [f"{outcome.host_us:.0f}", outcome.gradients(request.tolerance)]
        table.add(*cells)
    return table


def _peak(outcome: Outcome) -> int | None:
    peaks = [peak for peak in outcome.peak_bytes if peak is not None]
    return max(peaks, default=None)


def _title(field: Field) -> str:
    request = field.request
    what = f"{request.stages} stages, {request.microbatches} micro-batches"
    if request.emulate is not None:
        what += f", layers that sleep ({request.emulate.name})"
    turns = f"{request.rounds} turns of {request.steps_a_turn} steps"
    return f"{what}, {turns}, {dist.get_backend()}"


def _reference(field: Field, outcomes: Sequence[Outcome]) -> str:
    plain = field.request.reference == "plain"
    return "a plain loop" if plain else outcomes[0].name


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
