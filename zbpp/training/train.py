"""One process's share of `zbpp train`: steps, validation, checkpoints, and the log.

All processes run the same code and read the same text; what a step draws of it depends
on the seed and the step alone. Rank 0 prints and writes.
"""

import json
import logging
import math
import sys
import time
from collections import ChainMap
from collections.abc import Mapping
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import Progress
from torch.optim.lr_scheduler import LambdaLR

from zbpp import diagnostics
from zbpp.checkpoint import CheckpointError, locked
from zbpp.core import RequestError, WorkerError
from zbpp.models.configs import read_config
from zbpp.pipeline import Pipeline
from zbpp.planning import Plan
from zbpp.profiling.memory import peak_held
from zbpp.runtime.optim.decision import StepResult
from zbpp.runtime.support.devices import asked_device
from zbpp.simulator import bubble_rate, simulate, write_trace
from zbpp.training.llama import VOCABULARY
from zbpp.training.options import HF, TrainOptions
from zbpp.training.setup import build_pipeline, measures_first, model_of
from zbpp.training.stop_request import stop_requests
from zbpp.training.text import Batch, load_corpus

__all__ = ["check", "train"]

_WARM_UP_STEPS = 10
_LOG_EVERY = 10
_SAVE_EVERY, _KEEP = 100, 3
_VALIDATION_MICROBATCHES = 32
_LOG = logging.getLogger("zbpp")


def train(options: TrainOptions, plan: Plan) -> int:
    """Run this process's share of a training.

    Returns:
        The exit code: 0, or another if a signal has stopped the run.

    Raises:
        RequestError: the text cannot be read, or the folder is of another training.
        CheckpointError: the state of the end could not be saved.
    """
    torch.set_num_threads(1)  # more threads would add numbers in another order
    _check_model(options.model)
    pipeline = build_pipeline(
        options,
        plan,
        model_of(options),
        lr=options.lr,
        clip_grad_norm=options.clip_grad_norm,
    )
    corpus = load_corpus(options.data, seq=options.seq)
    rates = [LambdaLR(optimizer, _warm_up) for optimizer in pipeline.optimizers]
    pipeline.attach(*rates)
    n_samples = pipeline.n_microbatches * options.microbatch_size
    same = {"seed": options.seed, "data": corpus.sha256}
    folder = options.save_dir
    with (
        nullcontext() if folder is None or pipeline.rank else locked(folder),
        stop_requests(pipeline.n_ranks, enabled=folder is not None) as request,
    ):
        first = _resume(pipeline, folder, same) if folder else 0
        with _Log(pipeline, options, first, n_samples * options.seq) as log:
            log.print(corpus.describe())
            log.print(_describe(pipeline, options))
            if pipeline.plan.line:
                log.print(pipeline.plan.line)
            if first:
                log.print(f"resumed after step {first} from {folder}")
            for step in range(first, options.steps):
                if request is not None and request.stops_before(step):
                    break
                batch = corpus.training_batch(
                    seed=options.seed, step=step, windows=n_samples, seq=options.seq
                )
                log.add(pipeline.step(*_arguments(pipeline, batch)))
                if step == first:
                    log.print(f"backward: {diagnostics.split_summary(pipeline)}")
                for rate in rates:
                    rate.step()
                if folder and (step + 1) % _SAVE_EVERY == 0:
                    log.flush()  # a run that resumes here will not do it
                    pipeline.save(folder, keep=_KEEP, extra=same)
            log.flush()
            if folder and pipeline.n_steps > first and pipeline.n_steps % _SAVE_EVERY:
                pipeline.save(folder, keep=_KEEP, extra=same)
            try:
                pipeline.finish_saving()
            except CheckpointError as error:
                raise WorkerError(
                    f"the training ended after step {pipeline.n_steps}, but {error}"
                ) from error
            if request is not None and pipeline.n_steps < options.steps:
                log.print(
                    f"stopped after step {pipeline.n_steps} by a signal, and saved in "
                    f"{folder}; the same command resumes there"
                )
                return request.exit_code
            validation = corpus.validation_batch(
                windows=_VALIDATION_MICROBATCHES * options.microbatch_size,
                seq=options.seq,
            )
            _conclude(pipeline, options, log, _arguments(pipeline, validation))
    return 0


def check(options: TrainOptions, _: Plan) -> None:
    """Find before any process is started what would stop a training."""
    _check_model(options.model)
    asked_device(options.device)
    load_corpus(options.data, seq=options.seq)


def _check_model(name: str | None) -> None:
    """Refuse a model whose tokens cannot be bytes."""
    if name is None:
        return
    if not name.startswith(HF):
        raise RequestError(
            f"--model {name}: zbpp train takes hf:PATH, a config.json of transformers "
            "or the folder of a checkpoint; another model is trained by a script, with "
            "zbpp.Pipeline"
        )
    if (n_tokens := read_config(name.removeprefix(HF)).vocab_size) < VOCABULARY:
        raise RequestError(
            f"{name}: its vocabulary has {n_tokens} tokens, and a token of the text is "
            f"a byte; it needs {VOCABULARY} or more"
        )


def _warm_up(step: int) -> float:
    """Learning rate of a step (from 0 on) as a share of the full one."""
    return min(1.0, (step + 1) / _WARM_UP_STEPS)


def _arguments(pipeline: Pipeline, batch: Batch) -> tuple[Any, ...]:
    """A batch as the model takes it: those of transformers shift labels themselves."""
    tokens, following = map(torch.from_numpy, batch)
    if pipeline.layered.cut_batch is None:
        return tokens, following
    return ({"input_ids": tokens, "labels": tokens},)


def _conclude(
    pipeline: Pipeline, options: TrainOptions, log: "_Log", validation: tuple[Any, ...]
) -> None:
    """Compare with the simulation, validate, hash the parameters."""
    pipeline.synchronize()
    prediction = None
    if log.seconds > 0:  # else there was no step left to do
        if options.trace is not None:
            timeline = diagnostics.timeline(pipeline)
            if pipeline.rank == 0:
                write_trace([timeline], options.trace, microseconds_per_unit=1e6)
        is_planned = measures_first(options) and not pipeline.n_switches
        costs = pipeline.plan.costs if is_planned else None
        prediction = diagnostics.prediction(pipeline, costs)
        log.print(prediction.line)
    val_loss = pipeline.evaluate(*validation, n_microbatches=_VALIDATION_MICROBATCHES)
    params_sha256 = _hash_parameters(pipeline)
    log.print(f"validation loss: {val_loss:.4f}  training time: {log.seconds:.1f} s")
    log.print(f"parameters sha256: {params_sha256}")
    log.write_final(
        val_loss=val_loss,
        params_sha256=params_sha256,
        mode=pipeline.schedule.name,
        n_stages=pipeline.schedule.n_stages,
        n_microbatches=pipeline.n_microbatches,
        prediction=prediction and prediction.as_dict(),
    )


def _hash_parameters(pipeline: Pipeline) -> str:
    """Hash all parameters, whatever the split: each process hashes its own by name."""
    parts = {}
    for prefix, layer in pipeline.named_layers():
        for name, p in layer.named_parameters(prefix=prefix):
            numbers = p.detach().cpu().contiguous().view(-1).view(torch.uint8)
            parts[name] = sha256(numbers.numpy().tobytes()).hexdigest()
    everywhere = dict(ChainMap(*pipeline.gather(parts)))
    lines = "".join(f"{name} {everywhere[name]}\n" for name in sorted(everywhere))
    return sha256(lines.encode()).hexdigest()


def _describe(pipeline: Pipeline, options: TrainOptions) -> str:
    """One line about the model and the run (every rank must call)."""
    own_name, ties = pipeline.layered.own_name, pipeline.layered.ties
    copies = {own_name(*place) for tie in ties for place in tie[1:]}
    here = {name: p.numel() for name, p in pipeline.named_parameters()}
    sizes = dict(ChainMap(*pipeline.gather(here)))
    n_parameters = sum(n for name, n in sizes.items() if name not in copies)
    schedule = pipeline.schedule
    return (
        f"model: {n_parameters:,} parameters in {pipeline.n_layers} layers; "
        f"{schedule.name}, {schedule.n_stages} stages in {pipeline.n_ranks} "
        f"process(es), {schedule.n_microbatches} micro-batches of "
        f"{options.microbatch_size} x {options.seq} bytes, {options.dtype} on "
        f"{pipeline.device.type}"
        f"{', post-validated' if schedule.is_post_validated else ''}"
    )


def _resume(pipeline: Pipeline, folder: Path, same: Mapping[str, Any]) -> int:
    """Load the newest whole checkpoint, if there is one; return the steps done."""
    try:
        extra = pipeline.load(folder, missing_ok=True)
    except CheckpointError:
        raise
    except RequestError as error:
        raise RequestError(
            f"the newest checkpoint in {folder} is of another model: {error}; give "
            "the same options, or another --save_dir"
        ) from error
    others = [name for name in same if extra and extra.get(name) != same[name]]
    if others:
        raise RequestError(
            f"the checkpoint in {folder} is of another training, with another "
            f"{' and '.join(others)}; give the same, or another --save_dir"
        )
    return pipeline.n_steps


class _Log:
    """Lines, a progress bar and a metrics file, all of rank 0; use it as a context.

    A result is read when the next step has been issued, as reading waits for it.
    """

    def __init__(
        self, pipeline: Pipeline, options: TrainOptions, first: int, tokens: int
    ) -> None:
        self._device, self._is_first = pipeline.device, pipeline.rank == 0
        self._bubble = bubble_rate(simulate(pipeline.schedule, pipeline.plan.costs))
        self._steps, self._first, self._tokens = options.steps, first, tokens
        is_shown = self._is_first and sys.stdout is not None and sys.stdout.isatty()
        self._console = Console()
        self._progress = Progress(
            console=self._console, transient=True, disable=not is_shown
        )
        self._bar = self._progress.add_task("", total=options.steps, completed=first)
        self._handler = RichHandler(
            console=self._console, show_time=False, show_level=False, show_path=False
        )
        self._file: TextIO | None = None
        if self._is_first and options.metrics is not None:
            way: Literal["a", "w"] = "a" if first else "w"  # a run that resumes appends
            self._file = options.metrics.open(way, encoding="utf-8", buffering=1)
        self._pending: StepResult | None = None
        self._times = [time.perf_counter()]  # of the start, then of each step's end
        self._logged = first  # last step with a line
        self._rollbacks = self._skipped = 0

    def __enter__(self) -> "_Log":
        if self._is_first:
            _LOG.addHandler(self._handler)
            _LOG.setLevel(logging.INFO)
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
        _LOG.removeHandler(self._handler)
        _LOG.setLevel(logging.NOTSET)
        if self._file is not None:
            self._file.close()

    @property
    def seconds(self) -> float:
        """From the start to the end of the last step."""
        return self._times[-1] - self._times[0]

    def print(self, line: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if self._is_first:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def add(self, result: StepResult) -> None:
        """Report the step before the one that has been issued."""
        self._times.append(time.perf_counter())
        self._report(len(self._times) - 2)
        self._pending = result

    def flush(self) -> None:
        """Report the last step so far."""
        self._report(len(self._times) - 1)

    def _report(self, number: int) -> None:
        """Report the pending step, the ``number``-th of this process."""
        result, self._pending = self._pending, None
        if result is None or not self._is_first:
            return
        step = self._first + number
        self._rollbacks += result.rollbacks
        self._skipped += result.skipped
        self._write(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            tokens_per_s=self._speed(number - 1, number),
            rollbacks=result.rollbacks,
            skipped=result.skipped,
        )
        if step in (self._first + 1, self._steps) or step % _LOG_EVERY == 0:
            self.print(self._line(step, result))
            self._logged = step
        self._progress.update(self._bar, completed=step)

    def _line(self, step: int, result: StepResult) -> str:
        """A step as torchtitan's log has it, with the pipeline's own numbers."""
        speed = self._speed(self._logged - self._first, step - self._first)
        parts = [
            f"step: {step:2}",
            f"loss: {result.loss:7.4f}",
            f"grad_norm: {result.grad_norm:7.4f}",
            f"memory: {(peak_held(self._device) or 0) / 2**30:5.2f}GiB",
            f"tps: {speed:,.0f}",
            f"bubble: {self._bubble:.1%} (simulated)",
            f"rolled back: {self._rollbacks}",
        ]
        return "  ".join([*parts, *["skipped: not finite"] * result.skipped])

    def _speed(self, first: int, last: int) -> float:
        """Tokens in a second, between two steps of this process."""
        seconds = self._times[last] - self._times[first]
        return (last - first) * self._tokens / (seconds or math.inf)

    def write_final(self, **results: object) -> None:
        """Write the last line of the metrics file, with sums over the run."""
        speed = self._speed(0, len(self._times) - 1)
        counts = {"rollbacks": self._rollbacks, "skipped": self._skipped}
        self._write(final=True, **results, tokens_per_s=speed, **counts)

    def _write(self, **values: object) -> None:
        """Write a line of JSON, which has no infinity: null."""
        if self._file is not None:
            finite = {
                key: value if not isinstance(value, float) or math.isfinite(value)
                else None
                for key, value in values.items()
            }  # fmt: skip
            self._file.write(json.dumps(finite, allow_nan=False) + "\n")
