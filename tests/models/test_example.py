"""The script that a user copies: it trains, saves, and resumes under another mode."""

import runpy
import sys

import pytest
import torch
from pages import ROOT

pytest.importorskip("transformers")

SCRIPT = ROOT / "examples" / "hf_causal_lm.py"


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    threads = torch.get_num_threads()

    def script(folder, *flags):
        argv = [
            SCRIPT.name,
            str(ROOT / "README.md"),
            "--folder",
            str(tmp_path / folder),
        ]
        monkeypatch.setattr(sys, "argv", [*argv, *flags])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    yield script
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_resumed_run_is_the_run_without_a_stop(run):
    whole = run("whole", "--stages", "2", "--steps", "12")
    assert len(whole) == 12
    first = run("parts", "--stages", "2", "--steps", "10")
    then = run("parts", "--stages", "4", "--mode", "ZBV", "--steps", "12")
    assert first + then == whole
    losses = [float(line.split()[-1]) for line in whole]
    assert losses[-1] < losses[0] - 1
