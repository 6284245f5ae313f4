"""The share of one process in a training run: build, train, validate, report.

All processes run the same code. Only those whose stage reads inputs or targets load
the text; only rank 0 writes anything, and the pipeline brings it the results.
"""

from functools import partial

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from zbpp import diagnostics
from zbpp.core import RequestError, WorkerError, write_costs
from zbpp.models.configs.text_model import TextModel
from zbpp.models.layered import layer_name
from zbpp.pipeline import Pipeline
from zbpp.planning import Plan
from zbpp.planning.answer import recomputed_layers
from zbpp.profiling.prediction import Prediction
from zbpp.runtime.driver.stop_request import StopRequest, stop_requests
from zbpp.simulator import bubble_rate, simulate, write_trace
from zbpp.training.build import build_pipeline, estimate_layers
from zbpp.training.data import Batch, Corpus, load_corpus
from zbpp.training.fingerprint import combine, fingerprints
from zbpp.training.log import Recorder
from zbpp.training.options import Train
from zbpp.training.resume import RunSaver, folder_of_one_run
from zbpp.training.setup import measures_first, model_of

__all__ = ["train"]

_WINDOW = 10  # steps that are measured: the last ones
_LONG_S = 60.0


def train(options: Train, plan: Plan) -> int:
    """Run this process's share of a training.

    Returns:
        The exit code: 0, or another if a signal has stopped the run.

    Raises:
        RequestError: the text cannot be read, or differs between the processes.
    """
    torch.set_num_threads(1)  # more threads would add numbers in another order
    pipeline = build_pipeline(options, plan)
    with (
        folder_of_one_run(pipeline, options.save_dir),
        stop_requests(
            pipeline.n_ranks, enabled=options.save_dir is not None
        ) as request,
    ):
        return _train(pipeline, options, request)


def _train(pipeline: Pipeline, options: Train, request: StopRequest | None) -> int:
    corpus, about_data, data = _load(pipeline, options)
    rates = _attach_rates(pipeline, options)
    windows = pipeline.n_microbatches * options.microbatch_size
    windows *= options.data_parallel
    model = model_of(options)
    same = {"data": data, **model.about()}
    saver = RunSaver(pipeline, options, same=same, samples=windows)
    about_start = saver.resume()
    recorder = Recorder(
        enabled=pipeline.rank == 0,
        steps=options.steps or 0,
        first=pipeline.n_steps,
        tokens=windows * options.seq,
        bubble_rate=bubble_rate(simulate(pipeline.schedule, pipeline.plan.costs)),
        log_every=options.log_every,
        metrics=options.metrics,
        device=pipeline.device,
    )
    about_model = _describe_model(pipeline, options)
    with recorder, recorder.hearing():
        recorder.say(about_data)
        recorder.say(about_model)
        for line in (pipeline.plan.line, about_start):
            if line:
                recorder.say(line)
        stopped = _run_steps(
            pipeline, options, model, corpus, recorder, rates, saver, request
        )
        recorder.finish_steps()
        saver.finish()
        if not stopped:
            _conclude(pipeline, options, model, corpus, recorder)
        elif saver.problem is None:
            recorder.say(
                f"stopped after step {pipeline.n_steps} by a signal, and saved in "
                f"{options.save_dir}; --resume auto goes on from there"
            )
        _tell_problems(pipeline, recorder, saver)
    return request.exit_code if stopped and request is not None else 0


def _tell_problems(pipeline: Pipeline, recorder: Recorder, saver: RunSaver) -> None:
    """End every rank by an error if something was not written.

    Raises:
        WorkerError: it names all that is missing.
    """
    problems = [*recorder.problems, *([saver.problem] if saver.problem else [])]
    words = pipeline.gather("; ".join(problems))[0]
    if words:
        raise WorkerError(
            f"the training ended after step {pipeline.n_steps}, but {words}"
        )


def _load(pipeline: Pipeline, options: Train) -> tuple[Corpus | None, str, str]:
    """The text, where a stage of this process reads it, a line about it, its hash."""
    corpus = None
    if pipeline.needs_inputs or pipeline.needs_targets:
        corpus = load_corpus(options.data, seq=options.seq)
    own = (corpus.describe(), corpus.sha256) if corpus is not None else None
    abouts = pipeline.gather(own)
    read = {rank: about for rank, about in enumerate(abouts) if about is not None}
    if len(set(read.values())) > 1:
        raise RequestError(
            "inputs and targets would not belong together, as not all ranks read the "
            "same text with the same Python; mend this: "
            + "; ".join(f"rank {rank}: {about}" for rank, (about, _) in read.items())
        )
    return corpus, *next(iter(read.values()))


def _describe_model(pipeline: Pipeline, options: Train) -> str:
    """One line about the model and how it is run (every rank must call)."""
    copies = {layer_name(*place) for tie in pipeline.layered.ties for place in tie[1:]}
    own = [p for name, p in pipeline.named_parameters() if name not in copies]
    every = pipeline.gather(sum(p.numel() for p in own))
    counts = [every[rank] for rank in pipeline.place.pipeline]
    schedule = pipeline.schedule
    return (
        f"model: {sum(counts):,} parameters in {pipeline.n_layers} layers; "
        f"{schedule.name}, {schedule.n_stages} stages in {pipeline.n_ranks} "
        f"process(es){_describe_replicas(options)}, {schedule.n_microbatches} "
        "micro-batches of "
        f"{options.microbatch_size} x {options.seq} bytes, {options.dtype} on "
        f"{pipeline.device.type}"
        f"{', compiled' if options.compiles else ''}"
        f"{', post-validated' if schedule.is_post_validated else ''}"
    )


def _describe_replicas(options: Train) -> str:
    n, shared = options.data_parallel, options.tensor_parallel
    held = "" if options.shard == "none" else f", {options.shard} in parts"
    if options.alternating_buffers:
        held += ", in alternating buffers"
    words = "" if n == 1 else f" with {n} replicas{held}"
    return words if shared == 1 else f"{words}, {shared} for each stage"


def _attach_rates(pipeline: Pipeline, options: Train) -> list[LambdaLR]:
    warm_up = partial(_warm_up, options.warmup_steps)
    rates = [LambdaLR(optimizer, warm_up) for optimizer in pipeline.optimizers]
    pipeline.attach(*rates)
    return rates


def _run_steps(
    pipeline: Pipeline,
    options: Train,
    model: TextModel,
    corpus: Corpus | None,
    recorder: Recorder,
    rates: list[LambdaLR],
    saver: RunSaver,
    request: StopRequest | None,
) -> bool:
    """Train to the end; true if a signal has stopped the run before."""
    n_replicas = options.data_parallel
    windows = pipeline.n_microbatches * options.microbatch_size * n_replicas
    assert options.steps is not None, "start() has filled it in"
    first = pipeline.n_steps
    for step in range(first, options.steps):
        if request is not None and request.stops_before(step):
            return True
        inputs, targets = None, None
        if corpus is not None:
            batch = corpus.training_batch(
                seed=options.seed, step=step, windows=windows, seq=options.seq
            )
            inputs, targets = model.batch(*_share(pipeline, batch))
        recorder.add(pipeline.step(inputs, targets))
        if step == first:
            recorder.say(f"backward: {diagnostics.split_summary(pipeline)}")
        if options.cuda_graphs and step == first + 2:
            recorder.say(_describe_graphs(pipeline))
        for rate in rates:
            rate.step()
        saver.after_step(recorder.finish_steps)
    return False


def _describe_graphs(pipeline: Pipeline) -> str:
    """One line about passes that are CUDA graphs (every rank must call)."""
    parts = pipeline.gather(diagnostics.graph_report(pipeline))
    found = sorted((i, why) for one in parts for i, why in one.items())
    words = [f"{i}: {why or 'recorded'}" for i, why in found]
    return f"CUDA graphs of chunks: {'; '.join(words)}"


def _warm_up(steps: int, step: int) -> float:
    """Learning rate of a step (from 0 on) as a share of the full one."""
    return min(1.0, (step + 1) / max(1, steps))


def _conclude(
    pipeline: Pipeline,
    options: Train,
    model: TextModel,
    corpus: Corpus | None,
    recorder: Recorder,
) -> None:
    """Validate, hash the parameters, report."""
    n = _n_validation(options)
    inputs, targets = None, None
    if corpus is not None:
        batch = corpus.validation_batch(
            windows=n * options.microbatch_size * options.data_parallel,
            seq=options.seq,
        )
        inputs, targets = model.batch(*_share(pipeline, batch))
    pipeline.synchronize()
    prediction = None
    if recorder.seconds > 0:  # else there was no step left to do
        _trace(pipeline, options, recorder)
        prediction = _predict(pipeline, options, recorder).as_dict()
    val_loss = pipeline.evaluate(inputs, targets, n_microbatches=n)
    parts = pipeline.gather(fingerprints(pipeline.named_parameters()))
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


def _trace(pipeline: Pipeline, options: Train, recorder: Recorder) -> None:
    """Write the last step's timeline, if it was asked for (every rank must call)."""
    if options.trace is not None:
        timeline = diagnostics.timeline(pipeline)
        if pipeline.rank == 0:
            with recorder.writing(f"--trace {options.trace}"):
                write_trace([timeline], options.trace, microseconds_per_unit=1e6)


def _predict(pipeline: Pipeline, options: Train, recorder: Recorder) -> Prediction:
    """Compare with the simulation, and write the costs file that was asked for.

    Every rank must call. The estimate of the memory takes some seconds, so it is made
    where it is asked for, or where they count for little.
    """
    planned, memory = None, None
    if measures_first(options) and not pipeline.n_switches:
        planned = memory = pipeline.plan.costs
    is_long = pipeline.gather(recorder.seconds >= _LONG_S)[0]
    if memory is None and (options.costs_out is not None or is_long):
        if pipeline.rank == 0:
            schedule, split = pipeline.schedule, [len(part) for part in pipeline.split]
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


def _n_validation(options: Train) -> int:
    """Micro-batches of validation that a replica reads."""
    return max(1, options.validation_microbatches // options.data_parallel)


def _share(pipeline: Pipeline, batch: Batch) -> tuple[Tensor, Tensor]:
    """The windows of a batch that this replica reads."""
    place = pipeline.place
    inputs, targets = (
        torch.from_numpy(part).tensor_split(place.n_replicas)[place.replica]
        for part in batch
    )
    return inputs, targets
