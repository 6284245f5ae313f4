"""The same bits whatever the mode, the number of stages and the transport."""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from schemas import mistakes
from torch import nn
from training_here import train_here

from zbpp.core import RequestError, write_schedule
from zbpp.planning import plan
from zbpp.training.data import load_corpus
from zbpp.training.fingerprint import combine, fingerprints
from zbpp.training.llama import build_layers, cross_entropy
from zbpp.training.loop import load_text
from zbpp.training.options import TrainOptions
from zbpp.training.setup import model_of

TINY = TrainOptions(
    stages=1,
    microbatches=6,
    microbatch_size=1,
    seq=16,
    size="tiny",
    steps=4,
    lr=1e-2,
    clip_grad_norm=0.5,
    data=Path(__file__),
)
"""Six layers: they do not divide by 4 chunks."""


@dataclass(frozen=True)
class Outcome:
    """The lines that a run has written into its metrics file."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    val_loss: float
    params_sha256: str


def read(metrics: Path) -> Outcome:
    *steps, final = map(json.loads, metrics.read_text().splitlines())
    assert not [text for line in (*steps, final) for text in mistakes("metrics", line)]
    assert final["final"] is True
    return Outcome(
        losses=tuple(line["loss"] for line in steps),
        norms=tuple(line["grad_norm"] for line in steps),
        val_loss=final["val_loss"],
        params_sha256=final["params_sha256"],
    )


def flags(**changed: object) -> list[str]:
    """The tiny run's flags for a command line."""
    chosen = vars(TINY) | changed
    return [_flag(k, v) for k, v in chosen.items() if v is not None]


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no_{name}"
    return f"--{name}={value}"


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Train in this process and tell how it went; the same run is done only once."""
    metrics = tmp_path_factory.mktemp("train") / "metrics.jsonl"

    @functools.cache
    def run(**changed: object) -> Outcome:
        train_here(TrainOptions(**(vars(TINY) | {"metrics": metrics} | changed)))
        return read(metrics)

    return run


@functools.cache
def plain_torch(clip_grad_norm: float) -> Outcome:
    """The same training without any pipeline, as a user of torch writes it."""
    torch.set_num_threads(1)
    config = model_of(TINY)
    model = nn.ModuleDict()
    model["layers"] = nn.ModuleList(build_layers(config, range(config.n_layers)))
    forward = nn.Sequential(*model["layers"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=TINY.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    corpus = load_corpus(TINY.data, seq=TINY.seq)
    losses, norms = [], []
    for step in range(TINY.steps):
        for group in optimizer.param_groups:
            group["lr"] = TINY.lr * min(1.0, (step + 1) / 10)
        inputs, targets = map(
            torch.from_numpy,
            corpus.training_batch(seed=0, step=step, windows=6, seq=TINY.seq),
        )
        loss = 0.0
        for x, y in zip(inputs.split(1), targets.split(1), strict=True):
            part = cross_entropy(forward(x), y) / 6
            part.backward()
            loss += part.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        norms.append(norm.item())
    with torch.no_grad():
        inputs, targets = corpus.validation_batch(windows=32, seq=TINY.seq)
        val_loss = cross_entropy(
            forward(torch.from_numpy(inputs)), torch.from_numpy(targets)
        ).item()
    digest = combine([fingerprints(model.named_parameters())])
    return Outcome(tuple(losses), tuple(norms), val_loss, digest)


@pytest.mark.parametrize(("mode", "stages"), [("ZBH1", 2), ("VPP", 2), ("ZBV", 3)])
def test_modes_and_stages_do_not_change_a_bit(train, mode, stages):
    outcome = train(pipeline_schedule_mode=mode, stages=stages)
    assert outcome == train(pipeline_schedule_mode="1F1B", stages=1)


@pytest.mark.parametrize(
    "changed",
    [{"seed": 1}, {"microbatches": 3, "microbatch_size": 2}, {"lr": 1.001e-2}],
    ids=["seed", "micro-batches", "lr"],
)
def test_other_trainings_do_differ(train, changed):
    assert train(**changed).params_sha256 != train().params_sha256


@pytest.mark.parametrize("clip_grad_norm", [1e9, 0.5], ids=["unclipped", "clipped"])
def test_training_agrees_with_plain_torch(train, clip_grad_norm):
    ours = train(clip_grad_norm=clip_grad_norm, stages=2)
    plain = plain_torch(clip_grad_norm)
    assert max(plain.norms) > 0.5, "the clipped case must clip"
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert ours.norms == pytest.approx(plain.norms, rel=1e-4)
    assert ours.val_loss == pytest.approx(plain.val_loss, rel=1e-5)


@pytest.mark.slow
def test_bf16_trains_nearly_the_same(train):
    exact, rounded = train(), train(dtype="bf16", stages=2)
    assert rounded.losses == pytest.approx(exact.losses, rel=0.02)
    assert rounded.losses != exact.losses
    again = train(dtype="bf16", stages=3, pipeline_schedule_mode="ZBV")
    assert again == rounded


def test_the_loss_falls(train):
    outcome = train(steps=20)
    assert 5.0 < outcome.losses[0] < 6.2
    assert outcome.losses[-1] < 4.7


def test_a_schedule_file_is_trained_with(train, tmp_path):
    path = tmp_path / "plan.json"
    write_schedule(plan("ZBV", n_stages=2, n_microbatches=6), path)
    own = {"stages": None, "microbatches": None}
    assert train(pipeline_schedule_mode=str(path), **own) == train()


def test_the_log_names_the_text_the_model_and_the_results(train, capsys):
    outcome = train(stages=2)
    lines = capsys.readouterr().out.splitlines()
    data, model, split, *steps, prediction, val, digest = lines
    assert data.startswith(f"data: {__file__}: 1 files, ")
    assert model.startswith("model: ") and "6 layers; ZBH1, 2 stages" in model
    assert split.startswith("backward: W computes the gradients of ")
    assert [line[:8] for line in steps] == ["step:  1", "step:  4"]
    assert prediction.startswith("prediction (simulated with the costs of the last")
    assert val.startswith(f"validation loss: {outcome.val_loss:.4f}")
    assert digest == f"parameters sha256: {outcome.params_sha256}"


def test_ranks_that_read_different_texts_are_refused():
    """Else the loss would compare one text's inputs with another's targets."""

    class TwoRanks:
        needs_inputs, needs_targets = True, False

        def gather(self, about: tuple[str, str]) -> list[tuple[str, str]]:
            line, digest = about
            return [about, (line.replace("sha256", "sha256 other"), digest)]

    with pytest.raises(RequestError, match=r"rank 0: data: .*; rank 1: data: "):
        load_text(TwoRanks(), TINY)


def run_command(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.dist
def test_two_processes_train_the_same(train, tmp_path):
    metrics = tmp_path / "processes.jsonl"
    result = run_command(["zbpp", "train", *flags(stages=2, metrics=metrics)])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("step:  1") == 1, "only rank 0 may write"
    assert read(metrics) == train()


@pytest.mark.slow
@pytest.mark.dist
def test_torchrun_trains_the_same(train, tmp_path):
    metrics = tmp_path / "torchrun.jsonl"
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    flag = flags(stages=2, metrics=metrics, pipeline_schedule_mode="ZBV")
    result = run_command([*torchrun, "-m", "zbpp", "train", *flag])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("step:  1") == 1
    assert read(metrics) == train()


@pytest.mark.slow
def test_metrics_count_rollbacks_and_skips(tmp_path, capsys):
    def rows(**changed):
        metrics = tmp_path / "metrics.jsonl"
        own = {"metrics": metrics, "stages": 2, "clip_grad_norm": 0.01}
        train_here(TrainOptions(**(vars(TINY) | own | changed)))
        return list(map(json.loads, metrics.read_text().splitlines()))

    speculative = rows(enable_optimizer_post_validation=True)
    behind = rows(enable_optimizer_post_validation=False)
    usual = rows()
    assert [row["rollbacks"] for row in speculative] == [1, 1, 1, 1, 4]
    assert [row["rollbacks"] for row in behind] == [0, 0, 0, 0, 0]
    assert [row["rollbacks"] for row in usual] == [0, 0, 0, 0, 0]
    out = capsys.readouterr().out
    assert out.count("rolled back: 4") == 1
    assert not any(row["skipped"] for row in speculative)
    for mine, *others in zip(speculative, behind, usual, strict=True):
        for key in mine.keys() - {"tokens_per_s", "rollbacks", "prediction"}:
            assert all(other[key] == mine[key] for other in others), key
