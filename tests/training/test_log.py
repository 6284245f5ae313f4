import json
import math
from dataclasses import dataclass, field

import pytest
from schemas import mistakes

from zbpp.training.log import Record, Recorder, log_line

RECORD = Record(10, 2.77121, 0.93124, 1766.4, 0, False)


@dataclass
class FakeResult:
    """A step's result that notes when it is read."""

    step: int
    reads: list[int] = field(default_factory=list)
    grad_norm: float = 0.5
    skipped: bool = False
    rollbacks: int = 0

    @property
    def loss(self) -> float:
        self.reads.append(self.step)
        return 10.0 / self.step


def run(steps, *, reads, results=None, **options):
    """The results read after each step, and after the last one was reported."""
    choice = {"enabled": True, "metrics": None} | options
    seen = []
    with Recorder(steps=steps, tokens=100, bubble_rate=0.04, **choice) as recorder:
        for step in range(1, steps + 1):
            recorder.add((results or {}).get(step) or FakeResult(step, reads))
            seen.append(sorted(set(reads)))
        recorder.finish_steps()
        recorder.write_final(val_loss=1.5, params_sha256=64 * "a")
    return [*seen, sorted(set(reads))]


def test_log_line_has_the_shape_of_torchtitan():
    assert log_line(RECORD, memory_gib=0.119, bubble_rate=0.0451) == (
        "step: 10  loss:  2.7712  grad_norm:  0.9312  memory:  0.12GiB  tps: 1,766  "
        "bubble: 4.5% (simulated)  rolled back: 0"
    )


def test_log_line_tells_of_a_skipped_step_and_leaves_unknown_memory_out():
    record = Record(3, math.inf, math.nan, 1.0, 2, True)
    assert log_line(record, memory_gib=None, bubble_rate=0.0) == (
        "step:  3  loss:     inf  grad_norm:     nan  tps: 1  "
        "bubble: 0.0% (simulated)  rolled back: 2  skipped: not finite"
    )


def test_memory_is_that_of_this_process(capsys):
    run(1, reads=[])
    told = capsys.readouterr().out.split("memory:")[1].split("GiB")[0]
    assert 0.01 < float(told) < 100


def test_metrics_are_read_one_step_late(tmp_path):
    seen = run(3, reads=[], metrics=tmp_path / "metrics.jsonl")
    assert seen == [[], [1], [1, 2], [1, 2, 3]]


def test_without_metrics_only_logged_steps_are_read():
    assert run(25, reads=[])[-1] == [1, 10, 20, 25]


def test_other_ranks_read_and_print_nothing(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    assert run(3, reads=[], enabled=False, metrics=path)[-1] == []
    assert capsys.readouterr().out == "" and not path.exists()


def test_metrics_are_one_json_line_a_step_and_a_final_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    bad = FakeResult(2, grad_norm=math.inf, skipped=True)
    run(3, reads=[], metrics=path, results={2: bad})
    *steps, final = map(json.loads, path.read_text().splitlines())
    assert not [
        wrong for line in (*steps, final) for wrong in mistakes("metrics", line)
    ]
    assert mistakes("metrics", steps[0] | {"loss": "5"})
    keys = {"step", "loss", "grad_norm", "tokens_per_s", "rollbacks", "skipped"}
    assert [set(line) for line in steps] == [keys] * 3
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["loss"] for line in steps] == [10.0, 5.0, 10.0 / 3]
    assert [line["grad_norm"] for line in steps] == [0.5, None, 0.5]
    assert [line["skipped"] for line in steps] == [False, True, False]
    assert final["final"] is True
    assert (final["val_loss"], final["params_sha256"]) == (1.5, 64 * "a")
    assert final["tokens_per_s"] > 0


def test_a_terminal_gets_a_progress_bar_and_whole_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    run(2, reads=[])
    out = capsys.readouterr().out
    assert "0/2" in out and "2/2" in out
    assert "bubble: 4.0% (simulated)  rolled back: 0" in out  # not wrapped at 40


def test_no_terminal_no_bar(capsys):
    run(2, reads=[])
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines] == ["step:  1", "step:  2"]


def test_the_speed_of_a_log_line_is_the_mean_since_the_last_one(monkeypatch, capsys):
    clock = iter(range(100))  # a second a step, 100 tokens each
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    run(20, reads=[])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all("tps: 100  " in line for line in lines)


def test_the_metrics_file_is_closed_when_a_step_fails(tmp_path):
    recorder = Recorder(
        enabled=True, steps=2, tokens=1, bubble_rate=0.0,
        metrics=tmp_path / "metrics.jsonl",
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="lost"), recorder:
        recorder.add(FakeResult(1))
        raise RuntimeError("lost")
    assert recorder._file.closed
