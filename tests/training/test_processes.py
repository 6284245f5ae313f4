"""`zbpp train` in real processes: neither mode nor stages change a bit."""

import json
import subprocess
import sys

import pytest

MODES = ("FThenB", "1F1B", "VPP", "ZBH1", "ZBH2", "ZBV")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_all_modes_and_stages_end_with_the_same_losses_and_parameters(tmp_path):
    outcomes = set()
    for mode in MODES:
        for stages in (1, 2, 4):
            metrics = tmp_path / "metrics.jsonl"
            command = [
                sys.executable, "-m", "zbpp", "train", "--pipeline_schedule_mode", mode,
                "--stages", str(stages), "--steps", "3", "--metrics", str(metrics),
                "--validation_microbatches", "4",
            ]  # fmt: skip
            subprocess.run(command, check=True, capture_output=True)
            *steps, final = map(json.loads, metrics.read_text().splitlines())
            losses = tuple((step["loss"], step["grad_norm"]) for step in steps)
            outcomes.add((losses, final["val_loss"], final["params_sha256"]))
    assert len(outcomes) == 1
