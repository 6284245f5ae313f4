"""`zbpp train`: the same bits whatever the mode and the stages, and what it writes."""

import json
import math
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from pool import PATIENCE_S
from ranks import end_of, heed_ctrl_c
from training_here import run_train

import zbpp
from zbpp.checkpoint import locked, newest
from zbpp.cli import main
from zbpp.core import Pass, write_schedule

SENTENCE = "the quick brown fox jumps over the lazy dog and finds no other one"


@cache
def text() -> str:
    chosen = random.Random(0)
    words = SENTENCE.split()
    return " ".join(chosen.choice(words) for _ in range(2000))


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(text())
    return path


TINY = {
    "stages": 1, "microbatches": 6, "microbatch_size": 1, "seq": 16, "size": "tiny",
    "steps": 4, "lr": 1e-2, "clip_grad_norm": 0.5,
}  # fmt: skip
"""Six layers: they do not divide by 4 chunks."""

Rows = list[dict[str, Any]]
Train = Callable[..., Rows]


def words_of(**changed: object) -> list[str]:
    """The tiny run's flags for a command line; None leaves one out."""
    words = []
    for name, value in (TINY | changed).items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def rows_of(metrics: Path) -> Rows:
    from pages import mistakes  # jsonschema is slow to load

    rows: Rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert not [wrong for row in rows for wrong in mistakes("metrics", row)]
    assert rows[-1]["final"] is True
    return rows


def same(rows: Rows) -> Rows:
    """What is equal in all modes: all but the times and the rollbacks."""
    other = {"tokens_per_s", "rollbacks", "prediction", "mode", "n_stages"}
    return [{k: v for k, v in row.items() if k not in other} for row in rows]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, book: Path) -> Train:
    """Train in this process; the same run is done only once."""
    metrics = tmp_path_factory.mktemp("train") / "metrics.jsonl"

    @cache
    def run(**changed: object) -> Rows:
        settings = {"metrics": metrics, "data": book} | changed
        assert run_train(*words_of(**settings)) == 0
        return rows_of(metrics)

    return run


@pytest.mark.parametrize(("mode", "stages"), [("ZBH1", 2), ("VPP", 2), ("ZBV", 3)])
def test_modes_and_stages_do_not_change_a_bit(
    train: Train, mode: str, stages: int
) -> None:
    found = train(pipeline_schedule_mode=mode, stages=stages)
    assert same(found) == same(train(pipeline_schedule_mode="1F1B", stages=1))


def test_another_training_has_another_hash(train: Train) -> None:
    assert train(seed=1)[-1]["params_sha256"] != train()[-1]["params_sha256"]


def test_the_first_losses_are_the_recorded_ones(train: Train) -> None:
    """Frozen: the model, its weights of a seed, the windows of text, the warm-up."""
    *steps, final = train(steps=4)
    losses, norms = ([row[name] for row in steps] for name in ("loss", "grad_norm"))
    assert losses == pytest.approx([5.54997, 5.49588, 5.43019, 5.30155], rel=1e-4)
    assert norms == pytest.approx([1.13392, 1.14119, 0.98413, 1.19843], rel=1e-3)
    assert final["val_loss"] == pytest.approx(5.18717, rel=1e-4)
    assert steps[0]["loss"] == pytest.approx(math.log(256), abs=0.1), "a guess"


def test_a_schedule_file_is_trained_with(train: Train, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_schedule(zbpp.plan("ZBV", n_stages=2, n_microbatches=6), path)
    sizes = {"stages": None, "microbatches": None}
    found = train(pipeline_schedule_mode=str(path), **sizes)
    assert same(found) == same(train())


def test_steps_that_are_rolled_back_are_counted_and_change_nothing(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    clipped = {"stages": 2, "clip_grad_norm": 0.01}
    speculative = train(enable_optimizer_post_validation=True, **clipped)
    assert "rolled back: 4" in capsys.readouterr().out
    behind = train(enable_optimizer_post_validation=False, **clipped)
    assert [row["rollbacks"] for row in speculative] == [1, 1, 1, 1, 4]
    assert [row["rollbacks"] for row in behind] == [0] * 5
    assert same(speculative) == same(behind)


def test_a_step_that_is_not_finite_is_skipped_and_has_no_norm(train: Train) -> None:
    first, second, *_ = train(lr=1e30, steps=3)
    assert not first["skipped"] and first["grad_norm"] > 0
    assert second["skipped"] and second["grad_norm"] is None


def test_the_log_names_the_text_the_model_and_the_results(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    assert run_train(*words_of(stages=2, data=book, steps=12, trace=trace)) == 0
    lines = capsys.readouterr().out.splitlines()
    data, model, split, *steps, prediction, val, digest = lines
    assert data.startswith(f"data: {book}: 1 files, {len(text()):,} bytes ")
    assert model.startswith("model: ") and "6 layers; ZBH1, 2 stages" in model
    assert split.startswith("backward: W computes the gradients of ")
    assert [line[:8] for line in steps] == ["step:  1", "step: 10", "step: 12"]
    shape = (
        r"step:  1  loss:  5\.\d{4}  grad_norm:  \d\.\d{4}  "
        r"tps: [\d,]+  bubble: \d+\.\d% \(simulated\)  rolled back: 0"
    )
    assert re.fullmatch(shape, steps[0])
    assert prediction.startswith("prediction (simulated with the costs of the last")
    assert val.startswith("validation loss: ")
    assert re.fullmatch("parameters sha256: [0-9a-f]{64}", digest)
    events = json.loads(trace.read_text())["traceEvents"]
    orders = zbpp.plan("ZBH1", n_stages=2, n_microbatches=6).orders
    for stage, jobs in enumerate(orders):
        ran = [e["name"] for e in events if e["ph"] == "X" and e["tid"] == stage]
        passes = [str(job) for job in jobs if isinstance(job, Pass)]
        assert [name for name in ran if name in passes] == passes


def test_a_run_resumes_on_other_stages_and_appends_its_metrics(
    train: Train, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    saved = {"save_dir": tmp_path / "run", "data": book, "metrics": metrics}
    first = words_of(steps=2, pipeline_schedule_mode="ZBV", stages=2, **saved)
    assert run_train(*first) == 0
    assert [row.get("step") for row in rows_of(metrics)] == [1, 2, None]
    again = words_of(pipeline_schedule_mode="1F1B", stages=3, **saved)
    assert run_train(*again) == 0
    rows = rows_of(metrics)
    assert same([*rows[:2], *rows[3:]]) == same(train())
    capsys.readouterr()
    assert run_train(*words_of(**saved, seed=1)) == 2
    assert "of another training, with another seed" in capsys.readouterr().err


def test_the_text_is_divided_by_the_names_of_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No byte is on both sides, and more files move none to the other one."""

    def described(data: Path) -> tuple[int, int, int]:
        assert run_train(*words_of(data=data, steps=1)) == 0
        line = capsys.readouterr().out.splitlines()[0]
        figures = re.search(
            r": (\d+) files, ([\d,]+) bytes \(([\d,]+) for validation\)", line
        )
        assert figures, line
        files, n_bytes, held_out = (int(x.replace(",", "")) for x in figures.groups())
        return files, n_bytes, held_out

    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    for i in range(40):  # one repeated character each
        name = f"below/{i}.txt" if i % 2 else f"file_{i}.txt"
        (folder / name).write_text(chr(40 + i) * 100)
    (folder / ".hidden").write_text("not read")
    (folder / "empty.txt").write_text("")
    files, n_bytes, held_out = described(folder)
    separators = 40 - 2
    assert (files, n_bytes) == (40, 40 * 100 + separators)
    n_held_out = (held_out + 1) // 101
    assert held_out == 101 * n_held_out - 1 and 0 < n_held_out < 8
    for i in range(40, 44):
        (folder / f"file_{i}.txt").write_text("x" * 1000)
    assert described(folder)[2] in {held_out + 1001 * n for n in range(5)}


def test_without_data_the_library_of_python_is_the_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_train(*words_of(steps=1)) == 0
    line = capsys.readouterr().out.splitlines()[0]
    found = re.search(r"Python standard library: (\d+) files, ([\d,]+) bytes", line)
    assert found and int(found[1]) > 300
    assert int(found[2].replace(",", "")) > 5_000_000


@pytest.mark.nightly
@pytest.mark.slow
def test_auto_trains_with_the_same_bits_and_names_its_choice(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    auto = {"pipeline_schedule_mode": "auto", "stages": 2, "microbatches": 6}
    found = train(memory_limit="1GiB", **auto)
    out = capsys.readouterr().out
    assert re.search(r"auto: (ZB|interleaved|V)", out)
    assert "; predicted step " in out and "simulated with given costs" in out
    assert same(found) == same(train())
    assert run_train(*words_of(memory_limit="1MiB", size="small", **auto)) == 2
    assert "the smallest limit that works is" in capsys.readouterr().err


def test_a_folder_that_another_run_saves_into_is_refused(
    book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of(data=book, steps=1, save_dir=tmp_path)
    with locked(tmp_path):
        assert run_train(*words) == 2
    assert "another run saves" in capsys.readouterr().err
    assert run_train(*words) == 0
    assert newest(tmp_path) == tmp_path / "step-00000001"


Start = Callable[..., tuple[subprocess.Popen[str], list[psutil.Process]]]


@pytest.fixture
def start(book: Path, tmp_path: Path) -> Iterator[Start]:
    """Start the command with two stages; gives it and its processes after 5 steps."""
    started, metrics = [], tmp_path / "metrics.jsonl"

    def run(**changed: object) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        words = words_of(stages=2, data=book, metrics=metrics, **changed)
        process = subprocess.Popen(
            [sys.executable, "-m", "zbpp", "train", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_ctrl_c,
        )
        started.append(process)
        while not metrics.exists() or metrics.read_text().count("\n") < 5:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        return process, psutil.Process(process.pid).children(recursive=True)

    yield run
    for process in started:
        process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str], children: list[psutil.Process]) -> list[str]:
    """What it printed; no process is left, but for zombies that init has not seen."""
    printed = process.communicate(timeout=PATIENCE_S)
    _, left = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []
    return [*printed]


nightly = partial(pytest.param, marks=pytest.mark.nightly)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("number", "rank", "code"),
    [
        (signal.SIGKILL, "1", 1),
        nightly(signal.SIGKILL, None, -9),
        nightly(signal.SIGINT, None, 130),
    ],
)
def test_a_terminated_run_leaves_no_process(
    start: Start, number: signal.Signals, rank: str | None, code: int
) -> None:
    process, children = start(steps=100_000)
    ranks = {child.environ().get("RANK"): child for child in children}
    (ranks[rank] if rank else process).send_signal(number)
    _, words = finish(process, children)
    assert process.returncode == code
    if rank:
        assert words == "zbpp: rank 1 was killed by SIGKILL\n"


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), nightly(signal.SIGINT, 130)]
)
def test_a_signal_saves_and_the_run_can_be_resumed(
    train: Train, start: Start, book: Path, tmp_path: Path, number: int, code: int
) -> None:
    more = {"steps": 16, "save_dir": tmp_path / "run"}
    process, children = start(**more)
    process.send_signal(number)
    out, _ = finish(process, children)
    assert process.returncode == code and "by a signal, and saved in" in out
    metrics = tmp_path / "metrics.jsonl"
    assert run_train(*words_of(data=book, metrics=metrics, **more)) == 0
    assert same(rows_of(metrics)) == same(train(steps=16))


def train_on_a_rank(words: list[str]) -> None:
    sys.exit(main(["train", *words]))


@pytest.mark.slow
@pytest.mark.dist
def test_stages_that_differ_from_the_ranks_of_torchrun_are_refused(book: Path) -> None:
    for end in end_of(train_on_a_rank, 2, words_of(stages=3, data=book)):
        assert end.code == 2
        assert "--stages is 3, but torchrun has started 2" in end.words
