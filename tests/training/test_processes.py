"""`zbpp train` in real processes: neither mode nor stages change a bit."""

import json

import pytest

from zbpp.cli.commands import main

MODES = ("FThenB", "1F1B", "VPP", "ZBH1", "ZBH2", "ZBV")


pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(600)]


def outcome_of(tmp_path, *flags):
    """Losses, norms and parameters of a short run, and its rollbacks."""
    metrics = tmp_path / "metrics.jsonl"
    more = ("--validation_microbatches", "4", "--metrics", str(metrics))
    assert main(["train", *flags, *more]) == 0
    *steps, final = map(json.loads, metrics.read_text().splitlines())
    losses = tuple((step["loss"], step["grad_norm"]) for step in steps)
    outcome = (losses, final["val_loss"], final["params_sha256"])
    return outcome, sum(step["rollbacks"] for step in steps)


def test_all_modes_and_stages_end_with_the_same_losses_and_parameters(tmp_path):
    outcomes = set()
    for mode in MODES:
        for stages in ("1", "2", "4"):
            flags = ("--pipeline_schedule_mode", mode, "--stages", stages)
            outcomes.add(outcome_of(tmp_path, *flags, "--steps", "3")[0])
    assert len(outcomes) == 1


def test_steps_that_are_rolled_back_end_with_the_same(tmp_path):
    """Some speculative steps are valid, and some are clipped."""
    flags = ("--steps", "8", "--clip_grad_norm", "2.6")
    behind, none = outcome_of(tmp_path, *flags, "--no-enable_optimizer_post_validation")
    assert none == 0
    flags += ("--post_validation_failures", "11")  # speculative from the first step on
    ours, n_invalid = outcome_of(tmp_path, *flags)
    assert ours == behind
    assert 0 < n_invalid < 8
