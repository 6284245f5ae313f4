"""One process's share of `zbpp train`: steps, validation, checkpoints, and the log.

All processes run the same code and read the same text; what a step draws of it depends
on the seed and the step alone. Rank 0 prints and writes.
"""

import json
import logging
import math
import signal
import sys
import time
from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TextIO

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from zbpp import diagnostics
from zbpp.checkpoint import CheckpointError, locked
from zbpp.core import RequestError, WorkerError
from zbpp.models.configs import read_config
from zbpp.pipeline import Pipeline
from zbpp.planning import Plan
from zbpp.runtime.optim.decision import StepResult
from zbpp.runtime.support.devices import asked_device, runs_ahead
from zbpp.simulator import bubble_rate, simulate, write_trace
from zbpp.training.llama import VOCABULARY
from zbpp.training.options import HF, TrainOptions
from zbpp.training.setup import build_pipeline
from zbpp.training.text import Batch, load_corpus

_WARM_UP_STEPS = 10
_LOG_EVERY = 10
_SAVE_EVERY, _KEEP = 100, 3
_VALIDATION_MICROBATCHES = 32
_STOP = "zbpp_stop"
_LOG = logging.getLogger("zbpp")


def check(options: TrainOptions) -> None:
    """Find errors that would stop a training before any process is started."""
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


def train(options: TrainOptions, plan: Plan) -> int:
    """Run this process's share of a training.

    Returns:
        The exit code: 0, or another if a signal has stopped the run.

    Raises:
        RequestError: the text cannot be read, or the folder is of another training.
        CheckpointError: the state of the end could not be saved.
    """
    _check_model(options.model)
    pipeline, _ = build_pipeline(
        options, plan, lr=options.lr, clip_grad_norm=options.clip_grad_norm
    )
    corpus = load_corpus(options.data, seq=options.seq)
    rates = [LambdaLR(optimizer, _warm_up) for optimizer in pipeline.optimizers]
    pipeline.attach(*rates)
    n_samples = pipeline.n_microbatches * options.microbatch_size
    same = {"seed": options.seed, "data": corpus.sha256}
    folder, stop = options.save_dir, 0
    signal_before: Callable[[int], int] = lambda step: 0  # noqa: E731
    with ExitStack() as stack:
        if folder is not None:
            if pipeline.rank == 0:
                stack.enter_context(locked(folder))
            signal_before = stack.enter_context(_stop_requests(pipeline.n_ranks))
            _resume(pipeline, folder, same)
        first = pipeline.n_steps
        log = _Log(pipeline, options, tokens=n_samples * options.seq)
        stack.callback(log.close)
        stack.enter_context(log.messages())
        log.print(corpus.line)
        log.print(_describe(pipeline, options))
        if pipeline.plan.line:
            log.print(pipeline.plan.line)
        if first:
            log.print(f"resumed after step {first} from {folder}")
        for step in range(first, options.steps):
            if stop := signal_before(step):
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
        if stop:
            log.print(
                f"stopped after step {pipeline.n_steps} by a signal, and saved in "
                f"{folder}; the same command resumes there"
            )
            return 128 + stop
        validation = corpus.validation_batch(
            windows=_VALIDATION_MICROBATCHES * options.microbatch_size, seq=options.seq
        )
        _conclude(pipeline, options, log, _arguments(pipeline, validation))
    return 0


def _warm_up(step: int) -> float:
    """Learning rate of a step (from 0 on) as a share of the full one."""
    return min(1.0, (step + 1) / _WARM_UP_STEPS)


def _arguments(pipeline: Pipeline, batch: Batch) -> tuple[Any, ...]:
    """A batch as the model takes it: those of transformers shift labels themselves."""
    tokens, following = map(torch.from_numpy, batch)
    if pipeline.layered.cut_batch is None:
        return tokens, following
    return ({"input_ids": tokens, "labels": tokens},)


@contextmanager
def _stop_requests(n_ranks: int) -> Iterator[Callable[[int], int]]:
    """Give a function of a step that is about to begin: the signal to stop for, or 0.

        rank 1, before step s    got one; writes "s + 2" into the store of the group
        every rank               reads the store before each step; stops before s + 2

    A rank that is about to begin step t has seen the decision on step t - 2, for which
    every other rank has ended that step. So all find before s + 2 what was there before
    s. A single process stops at once, and a second signal ends it.
    """
    numbers: list[int] = []
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    if n_ranks > 1:
        store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]

    def note(number: int, frame: FrameType | None) -> None:
        numbers.append(number)
        if n_ranks == 1:
            signal.signal(number, signal.SIG_DFL)

    def signal_before(step: int) -> int:
        if numbers:
            last = step + 2 * (n_ranks > 1)
            store.compare_set(_STOP, "", f"{last} {numbers[0]}")
        if not store.check([_STOP]):
            return 0
        last, number = map(int, store.get(_STOP).split())
        return number if step >= last else 0

    before = {x: signal.signal(x, note) for x in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signal_before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _resume(pipeline: Pipeline, folder: Path, same: Mapping[str, Any]) -> None:
    """Load the newest whole checkpoint, if there is one."""
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
        is_planned = options.measures_first and not pipeline.n_switches
        costs = pipeline.plan.costs if is_planned else None
        prediction = diagnostics.prediction(pipeline, costs)
        log.print(prediction.line)
    val_loss = pipeline.evaluate(*validation, n_microbatches=_VALIDATION_MICROBATCHES)
    params_sha256 = _hash_parameters(pipeline)
    log.print(f"validation loss: {val_loss:.4f}  training time: {log.seconds:.1f} s")
    log.print(f"parameters sha256: {params_sha256}")
    log.write(
        final=True,
        val_loss=val_loss,
        params_sha256=params_sha256,
        mode=pipeline.schedule.name,
        n_stages=pipeline.schedule.n_stages,
        n_microbatches=pipeline.n_microbatches,
        prediction=prediction and asdict(prediction),
        tokens_per_s=log.speed(),
        **log.counts,
    )


def _hash_parameters(pipeline: Pipeline) -> str:
    """Hash all parameters, whatever the split: each process hashes a share by name."""
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
    sizes = ChainMap(*pipeline.gather(here))
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


class _Log:
    """Lines and a metrics file, both of rank 0; it must be closed.

    A result is read when the next step has been issued, as reading waits for it.
    """

    def __init__(self, pipeline: Pipeline, options: TrainOptions, tokens: int) -> None:
        self._device, self._is_first = pipeline.device, pipeline.rank == 0
        self._bubble = bubble_rate(simulate(pipeline.schedule, pipeline.plan.costs))
        self._first, self._last, self._tokens = pipeline.n_steps, options.steps, tokens
        self._file: TextIO | None = None
        if self._is_first and options.metrics is not None:
            way: Literal["a", "w"] = (
                "a" if self._first else "w"
            )  # a resumed run appends
            self._file = options.metrics.open(way, encoding="utf-8", buffering=1)
        self._pending: StepResult | None = None
        self._times = [time.perf_counter()]  # of the start, then of each step's end
        self.counts = Counter(rollbacks=0, skipped=0)

    def close(self) -> None:
        """Close the metrics file."""
        if self._file is not None:
            self._file.close()

    @contextmanager
    def messages(self) -> Iterator[None]:
        """Print the messages of the logger meanwhile."""
        handler = logging.StreamHandler(sys.stdout)
        if self._is_first:
            _LOG.addHandler(handler)
            _LOG.setLevel(logging.INFO)
        try:
            yield
        finally:
            _LOG.removeHandler(handler)
            _LOG.setLevel(logging.NOTSET)

    @property
    def seconds(self) -> float:
        """From the start to the end of the last step."""
        return self._times[-1] - self._times[0]

    def print(self, line: str) -> None:
        """Print a line."""
        if self._is_first:
            print(line, flush=True)

    def add(self, result: StepResult) -> None:
        """Report the step before the one that has been issued."""
        self.flush()
        self._times.append(time.perf_counter())
        self._pending = result

    def flush(self) -> None:
        """Report the last step so far."""
        result, self._pending = self._pending, None
        if result is None or not self._is_first:
            return
        number = len(self._times) - 1
        step = self._first + number
        counts = {"rollbacks": result.rollbacks, "skipped": result.skipped}
        self.counts.update(counts)
        self.write(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            tokens_per_s=self.speed(1),
            **counts,
        )
        if number != 1 and step != self._last and step % _LOG_EVERY:
            return
        parts = [  # as torchtitan's log has them, then the pipeline's numbers
            f"step: {step:2}",
            f"loss: {result.loss:7.4f}",
            f"grad_norm: {result.grad_norm:7.4f}",
        ]
        if runs_ahead(self._device):
            peak = torch.accelerator.max_memory_allocated(self._device)
            parts.append(f"memory: {peak / 2**30:5.2f}GiB")
        parts += [
            f"tps: {self.speed(_LOG_EVERY):,.0f}",
            f"bubble: {self._bubble:.1%} (simulated)",
            f"rolled back: {self.counts['rollbacks']}",
            *["skipped: not finite"] * result.skipped,
        ]
        self.print("  ".join(parts))

    def speed(self, most: float = math.inf) -> float:
        """Tokens in a second, in so many of the last steps."""
        n = min(most, len(self._times) - 1)
        seconds = self._times[-1] - self._times[-1 - int(n)]
        return n * self._tokens / (seconds or math.inf)

    def write(self, **values: object) -> None:
        """Write a line of JSON, which has no infinity: null."""
        if self._file is None:
            return
        for name, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                values[name] = None
        self._file.write(json.dumps(values, allow_nan=False) + "\n")
