"""`make gpu` says that there is no GPU, and its parts run on a CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu import day, host, memory
from parts.table import Table

MEASURED = [part for part in day.PARTS if part != "checks"]


def test_without_a_gpu_it_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "out"
    assert day.main(["--out", str(out)]) == 2
    said = capsys.readouterr().out.strip()
    assert "\n" not in said and "no GPU" in said
    assert not out.exists()


@pytest.mark.slow
def test_a_dry_run_writes_tables_of_all_parts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ["--device", "cpu", "--out", str(out), "--only", *MEASURED]
    assert day.main([*args, "--one_process"]) == 0
    found = json.loads((out / "results.json").read_text())
    text = (out / "README.md").read_text()
    assert [*found["parts"]] == MEASURED and "dry run" in text
    for part in MEASURED:
        tables = found["parts"][part]["tables"]
        assert tables, part
        for table in tables:
            assert table["rows"] and table["title"] in text
            assert {len(row) for row in table["rows"]} == {len(table["columns"])}


def test_a_part_that_fails_is_told_and_the_others_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(sizes: object) -> None:
        raise RuntimeError("CUDA error: on purpose")

    other = Table("Title", ["what"], [["host"]], "Notes.")
    monkeypatch.setattr(memory, "measure", fail)
    monkeypatch.setattr(host, "measure", lambda sizes: [other])
    out = tmp_path / "out"
    args = ["--device", "cpu", "--out", str(out), "--only", "memory", "host"]
    assert day.main([*args, "--one_process"]) == 1
    found = json.loads((out / "results.json").read_text())["parts"]
    assert "on purpose" in found["memory"]["failed"] and found["host"]["tables"]
    assert "on purpose" in (out / "README.md").read_text()


@pytest.mark.slow
def test_a_part_runs_in_a_process_of_its_own_and_within_its_time(
    tmp_path: Path,
) -> None:
    args = ["--device", "cpu", "--out", str(tmp_path), "--only", "checks"]
    assert day.main(args) == 0
    found = json.loads((tmp_path / "results.json").read_text())["parts"]
    ((outcome, n),) = found["checks"]["tables"][0]["rows"]
    assert n > 20, f"{outcome}: all tests marked gpu are collected"
    assert day.main([*args, "--minutes", "0"]) == 1
    found = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert "the time was up" in found["checks"]["failed"]
