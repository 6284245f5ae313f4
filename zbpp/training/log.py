"""The reports of a training run: log lines, a progress bar, metrics as JSON lines."""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, TextIO

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from zbpp.core import RequestError
from zbpp.profiling.memory import peak_held
from zbpp.runtime.optim.decision import StepResult

__all__ = ["Record", "Recorder", "log_line"]

_GIB = 2**30
_LOG_EVERY = 10
_LOG = logging.getLogger("zbpp")


@dataclass(frozen=True)
class Record:
    """One step as it is written down; ``step`` counts from 1."""

    step: int
    loss: float
    grad_norm: float
    tokens_per_s: float
    rollbacks: int
    skipped: bool


def log_line(record: Record, *, memory_gib: float | None, bubble_rate: float) -> str:
    """Write a step like torchtitan's log does, with the pipeline's own numbers.

    ``record.rollbacks`` is the number of steps since the run began.

    >>> record = Record(10, 2.77121, 0.93124, 1766.4, 0, False)
    >>> log_line(record, memory_gib=0.119, bubble_rate=0.0451)
    'step: 10  loss:  2.7712  grad_norm:  0.9312  memory:  0.12GiB  tps: 1,766  \
bubble: 4.5% (simulated)  rolled back: 0'
    """
    parts = [
        f"step: {record.step:2}",
        f"loss: {record.loss:7.4f}",
        f"grad_norm: {record.grad_norm:7.4f}",
        f"memory: {memory_gib:5.2f}GiB" if memory_gib is not None else "",
        f"tps: {record.tokens_per_s:,.0f}",
        f"bubble: {bubble_rate:.1%} (simulated)",
        f"rolled back: {record.rollbacks}",
        "skipped: not finite" if record.skipped else "",
    ]
    return "  ".join(part for part in parts if part)


@dataclass
class Recorder:
    """Reports a run of ``steps`` steps; use it as a context.

    A result is read when the next step has been started, because reading waits for
    it; and but for what is counted, only if a log line or the metrics file needs it.

    Args:
        enabled: False makes it silent, as it is on all ranks but one.
        steps: of the run.
        first: steps that were done before, by a run that this one goes on from; their
            lines stay in the metrics file.
        tokens: in one step.
        bubble_rate: as simulated, for the log line.
        metrics: file for the JSON lines, or None.
        device: whose largest memory so far is told: of torch on a GPU, else resident.
    """

    enabled: bool
    steps: int
    tokens: int
    bubble_rate: float
    metrics: Path | None
    first: int = 0
    device: torch.device | str = "cpu"
    problems: dict[str, str] = field(default_factory=dict, init=False)
    """Words about what could not be written, by what it is."""

    def __post_init__(self) -> None:
        self._file: TextIO | None = None
        self._bar: Progress | None = None
        self._pending: tuple[int, StepResult] | None = None
        self._times = [0.0]  # when the run began, then when each step was issued
        self._logged = self.first  # last step with a log line
        self._rollbacks = self._skipped = 0  # so far

    def __enter__(self) -> Self:
        if self.enabled and self.metrics is not None:
            try:
                lines = _lines_of_steps(self.metrics, self.first)
                self._file = self.metrics.open("w", encoding="utf-8", buffering=1)
            except OSError as error:
                raise RequestError(
                    f"--metrics {self.metrics}: cannot be written: {error.strerror}"
                ) from error
            self._write("".join(lines))
        if self.enabled and sys.stdout is not None and sys.stdout.isatty():
            self._bar = Progress(
                BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
                TimeRemainingColumn(), transient=True,
            )  # fmt: skip
            self._bar.start()
            self._bar.add_task("train", total=self.steps, completed=self.first)
        self._times = [time.perf_counter()]
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            self._file.close()

    @property
    def seconds(self) -> float:
        """From the beginning of the run to the end of the last step."""
        return self._times[-1] - self._times[0]

    def add(self, result: StepResult) -> None:
        """A step has been issued: report the one before it."""
        self._times.append(time.perf_counter())
        self._report_pending()
        self._pending = (self.first + len(self._times) - 1, result)

    def finish_steps(self) -> None:
        """Report the last step so far: at the end, and before it is saved."""
        self._report_pending()

    def write_final(self, **results: object) -> None:
        """Write the last line of the metrics file, with sums over the run."""
        speed = (len(self._times) - 1) * self.tokens / (self.seconds or math.inf)
        counts = {"rollbacks": self._rollbacks, "skipped": self._skipped}
        self._write(_json({"final": True, **results, "tokens_per_s": speed, **counts}))

    def say(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
        elif self.enabled:
            try:
                print(line, flush=True)
            except BrokenPipeError:  # the reader, such as head, has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Say what zbpp's logger has to say; without this it goes to stderr."""
        handler, level = _Hearing(self.say), _LOG.level
        _LOG.addHandler(handler)
        _LOG.setLevel(logging.INFO)
        try:
            yield
        finally:
            _LOG.setLevel(level)
            _LOG.removeHandler(handler)

    def _report_pending(self) -> None:
        if self._pending is None or not self.enabled:
            return
        step, result = self._pending
        self._pending = None
        self._rollbacks += result.rollbacks
        self._skipped += result.skipped
        if self._file is not None:
            self._write(_json(vars(self._record(step, result, since=step - 1))))
        ends = (self.first + 1, self.steps)
        if step in ends or step % _LOG_EVERY == 0:
            record = self._record(step, result, since=self._logged)
            peak = peak_held(torch.device(self.device))
            self.say(
                log_line(
                    replace(record, rollbacks=self._rollbacks),
                    memory_gib=None if peak is None else peak / _GIB,
                    bubble_rate=self.bubble_rate,
                )
            )
            self._logged = step
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    def _record(self, step: int, result: StepResult, *, since: int) -> Record:
        """Read a result; its speed is the mean over the steps after ``since``."""
        first = self.first
        seconds = self._times[step - first] - self._times[since - first]
        return Record(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            tokens_per_s=(step - since) * self.tokens / seconds,
            rollbacks=result.rollbacks,
            skipped=result.skipped,
        )

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Within this a file is written; that it cannot be ends no training."""
        try:
            yield
        except OSError as error:
            self.note(what, f"{what} cannot be written: {error.strerror}")

    def note(self, what: str, problem: str) -> None:
        """Note what could not be written; it is told again at the end of the run."""
        self.problems[what] = problem
        if self.enabled:
            _LOG.warning("%s; the run goes on", problem)

    def _write(self, text: str) -> None:
        """Write to the metrics file; a full disk ends no training."""
        if self._file is None:
            return
        what = f"--metrics {self.metrics}"
        with self.writing(what):
            self._file.write(text)
        if what in self.problems:
            with suppress(OSError):  # it flushes what could not be written
                self._file.close()
            self._file = None


class _Hearing(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(self.format(record))


def _lines_of_steps(path: Path, last: int) -> list[str]:
    """The lines of a metrics file up to a step; a torn one ends them."""
    kept: list[str] = []
    if last == 0 or not path.exists():
        return kept
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines(keepends=True):
        try:
            step = json.loads(line)["step"]
        except KeyError:  # the last line of a run
            continue
        except (ValueError, TypeError, RecursionError):
            break
        if isinstance(step, int) and step <= last:
            kept.append(line)
    return kept


def _json(values: dict[str, object]) -> str:
    """One line; JSON has no infinity, so what is not finite becomes null."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"
