"""The share of one process in a training run: build, train, validate, report.

All processes run the same code. Only those whose stage reads inputs or targets load
the text; only rank 0 writes anything, and the pipeline brings it the results.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from zbpp.core import RequestError, Schedule, write_costs
from zbpp.pipeline import Pipeline
from zbpp.pipeline.reports import summarize_split
from zbpp.profiling.prediction import Prediction
from zbpp.runtime.optim.patience import Patience
from zbpp.simulator import bubble_rate, simulate
from zbpp.training.data import Batch, Corpus, load_corpus
from zbpp.training.estimate import estimate_layers, memory_of
from zbpp.training.fingerprint import combine, fingerprints
from zbpp.training.llama import build_layers, cross_entropy
from zbpp.training.log import Recorder, resident_memory_gib
from zbpp.training.options import Train
from zbpp.training.setup import costs_of, device_of, measures_first, model_of
from zbpp.training.splits import asked_recompute, asked_split, run_split

__all__ = ["build_pipeline", "make_optimizer", "train"]

_BETAS = (0.9, 0.95)  # of AdamW, as usual for language models
_WINDOW = 10  # steps that are measured: the last ones
_LONG_S = 60.0


def train(options: Train, schedule: Schedule) -> None:
    """Run this process's share of a training.

    Raises:
        RequestError: the text cannot be read, or differs between the processes.
    """
    torch.set_num_threads(1)  # more threads would add numbers in another order
    pipeline = build_pipeline(options, schedule)
    schedule = pipeline.schedule
    corpus, about_data = _load(pipeline, options)
    costs = pipeline.chosen.costs or costs_of(options, schedule)[0]
    recorder = Recorder(
        enabled=pipeline.rank == 0,
        steps=options.steps or 0,
        tokens=schedule.n_microbatches * options.microbatch_size * options.seq,
        bubble_rate=bubble_rate(simulate(pipeline.schedule, costs)),
        log_every=options.log_every,
        metrics=options.metrics,
        memory_gib=partial(_peak_memory_gib, pipeline.device),
    )
    about_model = _describe_model(pipeline, options)
    with recorder, recorder.hearing():
        recorder.say(about_data)
        recorder.say(about_model)
        if pipeline.chosen.line:
            recorder.say(pipeline.chosen.line)
        _run_steps(pipeline, options, corpus, recorder)
        _conclude(pipeline, options, corpus, recorder)


def build_pipeline(options: Train, schedule: Schedule) -> Pipeline:
    """Make the pipeline of a training.

    Args:
        options: of the run.
        schedule: to run; where `measures_first`, only its sizes count.
    """
    model = model_of(options)
    how: dict[str, Any] = {
        "schedule": schedule,
        "split": run_split(options, schedule, model),
    }
    if measures_first(options):
        how = {
            "schedule": "auto",
            "split": asked_split(options),
            "n_microbatches": schedule.n_microbatches,
            "n_stages": schedule.n_stages,
            "memory": options.memory_limit,
            "example": _example(options, schedule.n_microbatches),
            "recompute": asked_recompute(options),
        }
    return Pipeline(
        partial(build_layers, model),
        n_layers=model.n_layers,
        loss_fn=cross_entropy,
        optimizer=partial(make_optimizer, options),
        **how,
        clip_grad_norm=options.clip_grad_norm,
        post_validation=options.enable_optimizer_post_validation,
        rollback=options.post_validation_rollback,
        patience=Patience(
            failures=options.post_validation_failures,
            window=options.post_validation_window,
            clean=options.post_validation_clean,
        ),
        max_consecutive_skips=options.max_consecutive_skips,
        device=device_of(options),
        autocast=torch.bfloat16 if options.dtype == "bf16" else None,
        exact_sums=options.exact_sums,
        timeout_s=options.timeout_s,
    )


def _example(options: Train, n_microbatches: int) -> tuple[Tensor, Tensor]:
    """A batch of the sizes of a step; what the bytes are makes no difference."""
    windows = n_microbatches * options.microbatch_size
    generator = torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(256, (windows, options.seq + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def make_optimizer(options: Train, parameters: list[nn.Parameter]) -> AdamW:
    """Make the optimizer of a stage."""
    return AdamW(
        parameters,
        lr=options.lr,
        betas=_BETAS,
        weight_decay=options.weight_decay,
        fused=True,
    )


def _load(pipeline: Pipeline, options: Train) -> tuple[Corpus | None, str]:
    """The text, where a stage of this process reads it, and a line about it."""
    corpus = None
    if pipeline.needs_inputs or pipeline.needs_targets:
        corpus = load_corpus(options.data, seq=options.seq)
    abouts = pipeline.gather(corpus.describe() if corpus is not None else None)
    read = {rank: about for rank, about in enumerate(abouts) if about is not None}
    if len(set(read.values())) > 1:
        raise RequestError(
            "inputs and targets would not belong together, as not all ranks read the "
            "same text with the same Python; mend this: "
            + "; ".join(f"rank {rank}: {about}" for rank, about in read.items())
        )
    return corpus, next(iter(read.values()))


def _describe_model(pipeline: Pipeline, options: Train) -> str:
    """One line about the model and how it is run (every rank must call)."""
    counts = pipeline.gather(sum(p.numel() for _, p in pipeline.named_parameters()))
    schedule = pipeline.schedule
    return (
        f"model: {sum(counts):,} parameters in {pipeline.n_layers} layers; "
        f"{schedule.name}, {schedule.n_stages} stages in {pipeline.n_ranks} "
        f"process(es), {schedule.n_microbatches} micro-batches of "
        f"{options.microbatch_size} x {options.seq} bytes, {options.dtype} on "
        f"{pipeline.device.type}"
        f"{', post-validated' if schedule.is_post_validated else ''}"
    )


def _run_steps(
    pipeline: Pipeline, options: Train, corpus: Corpus | None, recorder: Recorder
) -> None:
    warm_up = partial(_warm_up, options.warmup_steps)
    rates = [LambdaLR(optimizer, warm_up) for optimizer in pipeline.optimizers]
    windows = pipeline.n_microbatches * options.microbatch_size
    assert options.steps is not None, "start() has filled it in"
    for step in range(options.steps):
        inputs, targets = None, None
        if corpus is not None:
            inputs, targets = _tensors(
                corpus.training_batch(
                    seed=options.seed, step=step, windows=windows, seq=options.seq
                )
            )
        recorder.add(pipeline.step(inputs, targets))
        if step == 0:
            recorder.say(_describe_split(pipeline))
        for rate in rates:
            rate.step()


def _describe_split(pipeline: Pipeline) -> str:
    """One line about the gradients that wait for W (every rank must call)."""
    sizes = {name: p.numel() for name, p in pipeline.named_parameters()}
    where: dict[str, str] = {}
    counts: dict[str, int] = {}
    for one in pipeline.gather((pipeline.split_report(), sizes)):
        where |= one[0]
        counts |= one[1]
    return f"backward: {summarize_split(where, counts)}"


def _warm_up(steps: int, step: int) -> float:
    """Learning rate of a step (from 0 on) as a share of the full one."""
    return min(1.0, (step + 1) / max(1, steps))


def _conclude(
    pipeline: Pipeline, options: Train, corpus: Corpus | None, recorder: Recorder
) -> None:
    """Validate, hash the parameters, report."""
    n = options.validation_microbatches
    inputs, targets = None, None
    if corpus is not None:
        inputs, targets = _tensors(
            corpus.validation_batch(
                windows=n * options.microbatch_size, seq=options.seq
            )
        )
    pipeline.synchronize()
    recorder.finish_steps()
    prediction = _predict(pipeline, options, recorder)
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
        prediction=prediction.as_dict(),
    )


def _predict(pipeline: Pipeline, options: Train, recorder: Recorder) -> Prediction:
    """Compare with the simulation, and write the costs file that was asked for.

    Every rank must call. The estimate of the memory takes some seconds, so it is made
    where it is asked for, or where they count for little.
    """
    planned, memory = None, None
    if measures_first(options) and not pipeline.n_switches:
        planned, memory = pipeline.chosen.costs, pipeline.chosen.memory
    is_long = pipeline.gather(recorder.seconds >= _LONG_S)[0]
    if memory is None and (options.costs_out is not None or is_long):
        if pipeline.rank == 0:
            optimizer = partial(make_optimizer, options)
            memory = memory_of(pipeline, estimate_layers(options, optimizer))
        memory = pipeline.gather(memory)[0]
    if options.costs_out is not None:
        costs = pipeline.measured_costs(_WINDOW)
        if pipeline.rank == 0:
            assert memory is not None
            write_costs(costs, memory, options.costs_out)
    prediction = pipeline.prediction(planned, memory, n=_WINDOW)
    recorder.say(prediction.line)
    return prediction


def _peak_memory_gib(device: torch.device) -> float | None:
    """Largest memory so far: of the process, or of what torch holds on its GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    return resident_memory_gib()


def _tensors(batch: Batch) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(batch[0]), torch.from_numpy(batch[1])
