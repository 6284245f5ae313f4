"""Examples in the trainers of others print what their plain forms print."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import run_on_ranks

ROOT = Path(__file__).parents[2]
PLAIN, EXAMPLES = Path(__file__).parent / "plain", ROOT / "examples"
IN_TURN = ROOT / "tests" / "support" / "runs" / "in_turn.py"
MOST_LINES = 50
PATIENCE_S = 200

PACKAGES = {
    "hf_trainer": ("transformers", "accelerate"),
    "accelerate_loop": ("transformers", "accelerate"),
    "lightning_manual": ("lightning",),
    "peft_lora": ("transformers", "peft"),
}
"""Packages that each example needs besides torch."""


def numbers(printed: str) -> list[list[tuple[str, str]]]:
    """Line by line: losses, norms, learning rates, steps, and where in the data."""
    names = r"\b(\w*loss|grad_norm|learning_rate|epoch|step)\W+([\d.e+-]*\d)"
    lines = (re.findall(names, line) for line in printed.splitlines())
    return [line for line in lines if any("loss" in name for name, _ in line)]


def ran(*words: object) -> str:
    """What a command has printed, with one thread, and nothing asked of a network."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def code_lines(text: str) -> list[str]:
    """Lines of a script without blank lines and the text before the code."""
    body = text.partition('"""\n\n')[2]
    return [line for line in body.splitlines() if line.strip()]


def changed(name: str) -> int:
    plain, piped = (
        code_lines((folder / f"{name}.py").read_text()) for folder in (PLAIN, EXAMPLES)
    )
    assert len(piped) <= MOST_LINES
    return sum(line.startswith("+ ") for line in difflib.ndiff(plain, piped))


@pytest.mark.parametrize("name", PACKAGES)
def test_the_page_counts_the_changed_lines(name: str) -> None:
    page = (ROOT / "docs" / "coming_from.md").read_text()
    (told,) = re.findall(rf"{name}\.py\S* \|.*\| (\d+) of (\d+) \|", page)
    lines = len(code_lines((EXAMPLES / f"{name}.py").read_text()))
    assert told == (str(changed(name)), str(lines))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", PACKAGES)
def test_losses_are_those_of_the_plain_form(name: str, tmp_path: Path) -> None:
    for package in PACKAGES[name]:
        pytest.importorskip(package)
    text, script = ROOT / "LICENSE", EXAMPLES / f"{name}.py"
    plain, one, two = (tmp_path / folder for folder in ("plain", "one", "two"))
    more = [text, one, one / "checkpoint-5"] if name == "hf_trainer" else None
    again = ["--", script, *more] if more else []
    plainly = PLAIN / f"{name}.py"
    alone = ran(IN_TURN, plainly, text, plain, "--", script, text, one, *again)
    _, expected, *others = map(numbers, alone.split("== in turn"))
    assert len(expected) >= 8
    assert len({losses for (*_, losses) in expected}) >= 8  # it learns
    assert others[0] == expected
    if more:  # from the checkpoint on; the mean of all steps is one of fewer
        resumed = others[1][:-1]
        assert resumed == expected[-1 - len(resumed) : -1]
        assert len(resumed) > 4
    words = map(str, (script, text, two))
    assert numbers(run_on_ranks(2, tmp_path, *words)) == expected
    for file in plain.rglob("*.safetensors"):
        same_tensors(file, one / file.relative_to(plain))
        same_tensors(file, two / file.relative_to(plain))
    assert plain.exists() == (name in ("hf_trainer", "peft_lora"))


def same_tensors(file: Path, other: Path) -> None:
    import torch
    from safetensors.torch import load_file

    expected, found = load_file(file), load_file(other)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
