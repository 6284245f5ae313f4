"""The share of one process in a training run: build, train, validate, report.

All processes run the same code. Only those whose stage reads inputs or targets load
the text; only rank 0 writes anything, and the pipeline brings it the results.
"""

from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from zbpp import diagnostics
from zbpp.core import RequestError, WorkerError, write_costs
from zbpp.pipeline import Pipeline
from zbpp.planning import Plan
from zbpp.planning.answer import recomputed_layers
from zbpp.profiling.prediction import Prediction
from zbpp.runtime.driver.stop_request import StopRequest, stop_requests
from zbpp.simulator import bubble_rate, simulate, write_trace
from zbpp.training.data import Batch, Corpus, load_corpus
from zbpp.training.fingerprint import combine, fingerprints
from zbpp.training.log import Recorder
from zbpp.training.options import Train
from zbpp.training.resume import CHECKPOINT, RunSaver, folder_of_one_run
from zbpp.training.setup import (
    build_pipeline,
    estimate_layers,
    measures_first,
    model_of,
)

__all__ = ["load_text", "train"]

_WINDOW = 10  # steps that are measured: the last ones
_LONG_S = 60.0


def train(options: Train, plan: Plan) -> int:
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

    def __init__(self, pipeline: Pipeline, options: Train) -> None:
        self._pipeline, self._options = pipeline, options
        self._model = model_of(options)
        self._corpus, about_data, data = load_text(pipeline, options)
        warm_up = partial(_warm_up, options.warmup_steps)
        self._rates = [LambdaLR(optim, warm_up) for optim in pipeline.optimizers]
        pipeline.attach(*self._rates)
        samples = options.microbatch_size * options.data_parallel
        self._windows = pipeline.n_microbatches * samples
        same = {"data": data, **self._model.about()}
        self._saver = RunSaver(pipeline, options, same=same, samples=self._windows)
        about_start = self._saver.resume()
        assert options.steps is not None, "start() has filled it in"
        self._steps = range(pipeline.n_steps, options.steps)
        self._recorder = Recorder(
            enabled=pipeline.rank == 0,
            steps=options.steps,
            first=pipeline.n_steps,
            tokens=self._windows * options.seq,
            bubble_rate=bubble_rate(simulate(pipeline.schedule, pipeline.plan.costs)),
            log_every=options.log_every,
            metrics=options.metrics,
            device=pipeline.device,
        )
        about_model = _describe_model(pipeline, options)
        self._heads = [about_data, about_model, pipeline.plan.line, about_start]

    def run(self, request: StopRequest | None) -> bool:
        """Train, validate and report; true if a signal has stopped it before."""
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
                    f"{self._options.save_dir}; --resume auto goes on from there"
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
                inputs, targets = self._share(batch)
            recorder.add(pipeline.step(inputs, targets))
            if step == self._steps.start:
                recorder.say(f"backward: {diagnostics.split_summary(pipeline)}")
            for rate in self._rates:
                rate.step()
            self._saver.after_step(recorder)
        return False

    def _share(self, batch: Batch) -> tuple[Any, Any]:
        """The inputs and targets of a batch that this replica reads."""
        place = self._pipeline.place
        tokens, following = (
            torch.from_numpy(part).tensor_split(place.n_replicas)[place.replica]
            for part in batch
        )
        return self._model.batch(tokens, following)

    def _conclude(self) -> None:
        """Validate, hash the parameters, report."""
        options, pipeline, recorder = self._options, self._pipeline, self._recorder
        n = max(1, options.validation_microbatches // options.data_parallel)
        inputs, targets = None, None
        if self._corpus is not None:
            windows = n * options.microbatch_size * options.data_parallel
            inputs, targets = self._share(
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
        val_loss = pipeline.evaluate(inputs, targets, n_microbatches=n)
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
        """Compare with the simulation, and write the costs file that was asked for.

        The estimate of the memory takes some seconds, so it is made where it is asked
        for, or where they count for little.
        """
        options, pipeline, recorder = self._options, self._pipeline, self._recorder
        planned, memory = None, None
        if measures_first(options) and not pipeline.n_switches:
            planned = memory = pipeline.plan.costs
        is_long = pipeline.gather(recorder.seconds >= _LONG_S)[0]
        if memory is None and (options.costs_out is not None or is_long):
            if pipeline.rank == 0:
                schedule, split = (
                    pipeline.schedule,
                    [len(part) for part in pipeline.split],
                )
                again = recomputed_layers(schedule, split)
                layers = estimate_layers(options)
                memory = layers.on(schedule.placement, split, recompute=again)
            memory = pipeline.gather(memory)[0]
        if options.costs_out is not None:
            costs = diagnostics.measured_costs(pipeline, _WINDOW)
            if pipeline.rank == 0:
                assert memory is not None
                with recorder.writing(f"--costs_out {options.costs_out}"):
                    write_costs(costs.with_memory(memory), options.costs_out)
        prediction = diagnostics.prediction(pipeline, planned, memory, n=_WINDOW)
        recorder.say(prediction.line)
        return prediction


def load_text(pipeline: Pipeline, options: Train) -> tuple[Corpus | None, str, str]:
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


def _warm_up(steps: int, step: int) -> float:
    """Learning rate of a step (from 0 on) as a share of the full one."""
    return min(1.0, (step + 1) / max(1, steps))


def _describe_model(pipeline: Pipeline, options: Train) -> str:
    """One line about the model and how it is run (every rank must call)."""
    own_name, ties = pipeline.layered.own_name, pipeline.layered.ties
    copies = {own_name(*place) for tie in ties for place in tie[1:]}
    parameters = [p for name, p in pipeline.named_parameters() if name not in copies]
    every = pipeline.gather(sum(p.numel() for p in parameters))
    n_parameters = sum(every[rank] for rank in pipeline.place.pipeline)
    schedule, replicas = pipeline.schedule, ""
    if options.data_parallel > 1:
        held = "" if options.shard == "none" else f", {options.shard} in parts"
        if options.alternating_buffers:
            held += ", in alternating buffers"
        replicas = f" with {options.data_parallel} replicas{held}"
    if options.tensor_parallel > 1:
        replicas += f", {options.tensor_parallel} for each stage"
    return (
        f"model: {n_parameters:,} parameters in {pipeline.n_layers} layers; "
        f"{schedule.name}, {schedule.n_stages} stages in {pipeline.n_ranks} "
        f"process(es){replicas}, {schedule.n_microbatches} micro-batches of "
        f"{options.microbatch_size} x {options.seq} bytes, {options.dtype} on "
        f"{pipeline.device.type}"
        f"{', compiled' if options.compiles else ''}"
        f"{', post-validated' if schedule.is_post_validated else ''}"
    )
