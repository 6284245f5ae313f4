"""The share of one process in a training run: build, train, validate, report.

All processes run the same code. Only those whose stage reads inputs or targets load
the text; only rank 0 writes anything, and the pipeline brings it the results.
"""

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from zbpp import diagnostics
from zbpp.core import RequestError, WorkerError
from zbpp.pipeline import Pipeline
from zbpp.planning import Plan
from zbpp.planning.answer import recomputed_layers
from zbpp.profiling.prediction import Prediction
from zbpp.simulator import bubble_rate, simulate, write_trace
from zbpp.training.data import Batch, Corpus, load_corpus
from zbpp.training.fingerprint import combine, fingerprints
from zbpp.training.log import Recorder
from zbpp.training.options import TrainOptions
from zbpp.training.resume import CHECKPOINT, RunSaver, folder_of_one_run
from zbpp.training.setup import (
    build_pipeline,
    estimate_layers,
    measures_first,
    model_of,
)
from zbpp.training.stop_request import StopRequest, stop_requests

__all__ = ["load_text", "train"]

_WINDOW = 10  # steps that are measured: the last ones
_LONG_S = 60.0
_WARM_UP_STEPS = 10
_VALIDATION_MICROBATCHES = 32


def train(options: TrainOptions, plan: Plan) -> int:
    """Run this process's share of a training.

    Returns:
        The exit code: 0, or another if a signal has stopped the run.

    Raises:
        RequestError: the text cannot be read, or differs between the processes.
        WorkerError: something was not written; it names all that is missing.
    """
    torch.set_num_threads(1)  # more threads would add numbers in another order
    pipeline = build_pipeline(options, plan)
    saves = options.save_dir is not None
    with (
        folder_of_one_run(pipeline, options.save_dir),
        stop_requests(pipeline.n_ranks, enabled=saves) as request,
    ):
        stopped = _Training(pipeline, options).run(request)
    return request.exit_code if stopped and request is not None else 0


class _Training:
    """The objects that each step of a run needs; all ranks make the same calls."""

    def __init__(self, pipeline: Pipeline, options: TrainOptions) -> None:
        self._pipeline, self._options = pipeline, options
        self._model = model_of(options)
        self._corpus, about_data, data = load_text(pipeline, options)
        self._rates = [LambdaLR(optim, _warm_up) for optim in pipeline.optimizers]
        pipeline.attach(*self._rates)
        self._windows = pipeline.n_microbatches * options.microbatch_size
        same = {"data": data, **self._model.about()}
        self._saver = RunSaver(pipeline, options, same=same, samples=self._windows)
        about_start = self._saver.resume()
        self._steps = range(pipeline.n_steps, options.steps)
        self._recorder = Recorder(
            enabled=pipeline.rank == 0,
            steps=options.steps,
            first=pipeline.n_steps,
            tokens=self._windows * options.seq,
            bubble_rate=bubble_rate(simulate(pipeline.schedule, pipeline.plan.costs)),
            metrics=options.metrics,
            device=pipeline.device,
        )
        about_model = _describe_model(pipeline, options)
        self._heads = [about_data, about_model, pipeline.plan.line, about_start]

    def run(self, request: StopRequest | None) -> bool:
        """TrainOptions, validate and report; true if a signal has stopped it before."""
        pipeline, recorder, saver = self._pipeline, self._recorder, self._saver
        with recorder, recorder.hearing():
            for line in filter(None, self._heads):
                recorder.say(line)
            stopped = self._run_steps(request)
            recorder.finish_steps()
            saver.finish(recorder)
            if not stopped:
                self._conclude()
            elif CHECKPOINT not in recorder.problems:
                recorder.say(
                    f"stopped after step {pipeline.n_steps} by a signal, and saved in "
                    f"{self._options.save_dir}; the same command goes on from there"
                )
            words = pipeline.gather("; ".join(recorder.problems.values()))[0]
            if words:
                raise WorkerError(
                    f"the training ended after step {pipeline.n_steps}, but {words}"
                )
        return stopped

    def _run_steps(self, request: StopRequest | None) -> bool:
        options, pipeline, recorder = self._options, self._pipeline, self._recorder
        for step in self._steps:
            if request is not None and request.stops_before(step):
                return True
            inputs, targets = None, None
            if self._corpus is not None:
                batch = self._corpus.training_batch(
                    seed=options.seed, step=step, windows=self._windows, seq=options.seq
                )
                inputs, targets = self._tensors(batch)
            recorder.add(pipeline.step(inputs, targets))
            if step == self._steps.start:
                recorder.say(f"backward: {diagnostics.split_summary(pipeline)}")
            for rate in self._rates:
                rate.step()
            self._saver.after_step(recorder)
        return False

    def _tensors(self, batch: Batch) -> tuple[Any, Any]:
        """Inputs and targets of a batch, as the model takes them."""
        return self._model.batch(*map(torch.from_numpy, batch))

    def _conclude(self) -> None:
        """Validate, hash the parameters, report."""
        options, pipeline, recorder = self._options, self._pipeline, self._recorder
        inputs, targets = None, None
        if self._corpus is not None:
            windows = _VALIDATION_MICROBATCHES * options.microbatch_size
            inputs, targets = self._tensors(
                self._corpus.validation_batch(windows=windows, seq=options.seq)
            )
        pipeline.synchronize()
        prediction = None
        if recorder.seconds > 0:  # else there was no step left to do
            if options.trace is not None:
                timeline = diagnostics.timeline(pipeline)
                if pipeline.rank == 0:
                    with recorder.writing(f"--trace {options.trace}"):
                        write_trace(
                            [timeline], options.trace, microseconds_per_unit=1e6
                        )
            prediction = self._predict().as_dict()
        val_loss = pipeline.evaluate(
            inputs, targets, n_microbatches=_VALIDATION_MICROBATCHES
        )
        parts = pipeline.gather(
            fingerprints(
                pair
                for name, layer in pipeline.named_layers()
                for pair in layer.named_parameters(prefix=name)
            )
        )
        params_sha256 = combine(parts)
        recorder.say(
            f"validation loss: {val_loss:.4f}  training time: {recorder.seconds:.1f} s"
        )
        recorder.say(f"parameters sha256: {params_sha256}")
        recorder.write_final(
            val_loss=val_loss,
            params_sha256=params_sha256,
            mode=pipeline.schedule.name,
            n_stages=pipeline.schedule.n_stages,
            n_microbatches=pipeline.n_microbatches,
            prediction=prediction,
        )

    def _predict(self) -> Prediction:
        """Compare with the simulation.

        The estimate of the memory takes some seconds, so it is made where they count
        for little.
        """
        options, pipeline, recorder = self._options, self._pipeline, self._recorder
        planned, memory = None, None
        if measures_first(options) and not pipeline.n_switches:
            planned = memory = pipeline.plan.costs
        elif pipeline.gather(recorder.seconds >= _LONG_S)[0]:
            if pipeline.rank == 0:
                schedule = pipeline.schedule
                split = [len(part) for part in pipeline.split]
                again = recomputed_layers(schedule, split)
                layers = estimate_layers(options)
                memory = layers.on(schedule.placement, split, recompute=again)
            memory = pipeline.gather(memory)[0]
        prediction = diagnostics.prediction(pipeline, planned, memory, n=_WINDOW)
        recorder.say(prediction.line)
        return prediction


def load_text(
    pipeline: Pipeline, options: TrainOptions
) -> tuple[Corpus | None, str, str]:
    """The text, where a stage of this process reads it, a line about it, its hash."""
    corpus, about = None, None
    if pipeline.needs_inputs or pipeline.needs_targets:
        corpus = load_corpus(options.data, seq=options.seq)
        about = corpus.describe(), corpus.sha256
    abouts = enumerate(pipeline.gather(about))
    read = {rank: about for rank, about in abouts if about is not None}
    if len(set(read.values())) > 1:
        raise RequestError(
            "inputs and targets would not belong together, as not all ranks read the "
            "same text with the same Python; mend this: "
            + "; ".join(f"rank {rank}: {about}" for rank, (about, _) in read.items())
        )
    return corpus, *next(iter(read.values()))


def _warm_up(step: int) -> float:
    """Learning rate of a step (from 0 on) as a share of the full one."""
    return min(1.0, (step + 1) / _WARM_UP_STEPS)


def _describe_model(pipeline: Pipeline, options: TrainOptions) -> str:
    """One line about the model and how it is run (every rank must call)."""
    own_name, ties = pipeline.layered.own_name, pipeline.layered.ties
    copies = {own_name(*place) for tie in ties for place in tie[1:]}
    parameters = [p for name, p in pipeline.named_parameters() if name not in copies]
    every = pipeline.gather(sum(p.numel() for p in parameters))
    n_parameters = sum(every[rank] for rank in pipeline.place.pipeline)
    schedule = pipeline.schedule
    return (
        f"model: {n_parameters:,} parameters in {pipeline.n_layers} layers; "
        f"{schedule.name}, {schedule.n_stages} stages in {pipeline.n_ranks} "
        f"process(es), {schedule.n_microbatches} micro-batches of "
        f"{options.microbatch_size} x {options.seq} bytes, {options.dtype} on "
        f"{pipeline.device.type}"
        f"{', post-validated' if schedule.is_post_validated else ''}"
    )
