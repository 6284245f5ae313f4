"""Wrong command lines: each is refused in one line that names the way out."""

import re
from pathlib import Path

import pytest

FILES = {
    "broken.json": '{"f": 1,',
    "list.json": "[1, 2]",
    "large.json": '{"comm": 1e101}',
    "flat.json": '{"m_b": 1000000000, "m_w": 500000000}',
    "old.json": '{"format": "zbpp-schedule", "version": 9}',
    "torch.csv": "0F0,0B0",
    "empty.txt": "",
    "short.txt": "x" * 200,
    "their_model.py": """
import torch
from torch import nn
from torch.nn.functional import mse_loss

x = torch.ones(2, 4)
something = 3

def block(i=0):
    return nn.Linear(4, 4)

def layers():
    return [block(i) for i in range(6)], (x, x), mse_loss

def no_count():
    return (lambda indices: [block(i) for i in indices]), (x, x), mse_loss

def no_targets():
    return [block()], (x, None), mse_loss

def inputs_only():
    return [block()], x, mse_loss

def one_module():
    return block(), (x, x), mse_loss
""",
}
WRONG = {
    # words and flags
    "traim": 'Did you mean "train"?',
    "--stages 4 show": "Available commands: plan, show",
    "show ZBV --stage 4": "Did you mean --stages?",
    "show ZBV --stages --microbatches 3": "--stages requires an argument",
    "show ZBV -p 2 -m 3 --no_json": "--no_json",
    "plan ZBV -p 2 -m 3": "--out requires an argument",
    "compare -p 4": "--microbatches requires an argument",
    "plan ZBV ZBH1 -p 2 -m 3 -o x.json": "['ZBH1']",
    "show ZBV ZBH1 -p 2 -m 3": "several schedules are named",
    "show": "give a schedule file",
    "show ZBV -p 2": "--microbatches is missing",
    # values
    "show ZBW -p 2 -m 3": "did you mean",
    "show ZBV --stages four -m 3": "unable to convert",
    "show ZBV --stages -2 -m 3": "Must be >= 1",
    "train --clip_grad_norm 0": "Must be > 0",
    "train --dtype fp8": 'Choose from: "fp32", "bf16", "fp16"',
    "train --device gpu": "choose auto, cpu, cuda",
    "show ZBV -p 2 -m 3 --effort most": "fast",
    "show VPP -p 2 -m 3 --chunks_per_stage 0": "--chunks_per_stage",
    "plan ZBH1 -p 2 -m 3 -o x.json --layers layers.json --split odd": "not known",
    "plan ZBV -p 2 -m 3 -o x.json --recompute 0,9": "the chunks are 0 to 3",
    "estimate -p 2 -m 3 --model their_model:layers --optimizer adamx": (
        "torch.optim has no optimizer of this name"
    ),
    "bench -p 2 -o out --peers torch:ZBV": "--peers torch:ZBV: write torch",
    "bench -p 2 -o out --modes none": "nothing is to be compared",
    "bench -p 1 -o out": "compares nothing; it needs 2 or more",
    "playground --port 70000": "--port 70000 is not available",
    # limits
    "show ZBV -p 2 -m 3 --memory_limit lots": "40GiB",
    "show ZBV -p 2 -m 3 --memory_limit 40GiB": "in bytes",
    "show ZBV -p 4 -m 8 --memory_limit 0.1": "needs memory",
    "plan ZBH1 -p 2 -m 4 -o x.json --layers layers.json --memory_limit 2": "works is 4",
    "compare -p 2 -m 3 --memory_limit 0.9": "no mode is possible",
    "mesh --devices 8 -m 16 --layers mesh.json --memory_limit 1GiB": "fits; pp 8 x",
    "train --size tiny --stages 7": "6 layers cannot fill 7 chunks",
    "train --memory_limit 0.5": "over the limit 0.5",
    "estimate -p 40 -m 3 --model their_model:layers --modes 1F1B": "6 layers cannot",
    "show ZBV -p 1000000 -m 1000000": "are 6,000,000,000,000 jobs (F, B and W of each",
    # files that are read
    "show missing.json": "cannot be read",
    "show old.json": "'mode' is missing",
    "show torch.csv": "torch.csv: line 1, column 2: no JSON",
    "show ZBV -p 2 -m 3 --costs broken.json": "broken.json",
    "compare 1F1B -p 2 -m 3 --costs costs.json,missing.json": "missing.json: cannot",
    "show ZBV -p 2 -m 3 --costs large.json": "large.json: comm is 1e+101; take another",
    "train --data nowhere": "nowhere does not exist",
    "train --data empty.txt": "contains no text; give --data a text file",
    "train --data short.txt --seq 16": "leaves 10 bytes for validation; --seq 16 need",
    "train --size tiny --layers layers.json": "8 layers, but the model has 6",
    "show costs.json": "this is a costs file, not a schedule or plan file; give it",
    # contradictions
    "show ZBV -p 2 -m 3 --split 3,4": "needs --layers",
    "show ZBV -p 2 -m 3 --costs flat.json --layers flat.json": "leave --costs out",
    "show ZBV -p 2 -m 3 --shard parameters": "--shard parameters needs replicas",
    "plan ZBV -p 2 -m 3 -o x.json --recompute auto": "needs m_r",
    "mesh --devices 8 -m 16 --layers mesh.json --node 4": "go together",
    "mesh --devices 8 -m 16": "one of --layers and --model",
    "bench -p 2 -o out --emulate flat.json --model a:b": "does not go with --emulate",
    "profile -o x.json -p 9 --model their_model:layers": "6 layers cannot fill 9",
    "train --model their_model:layers": "hf:PATH",
    # files that are written
    "compare -p 4 -m 8 --out x.gif": "x.gif: the name of a picture must end in",
    "show ZBV -p 2 -m 3 -o .": "It is a folder",
    "plan ZBV -p 2 -m 3 -o x.json --csv no/x.csv": "There is no folder no",
    "train --metrics no/x.jsonl": 'Invalid value "no/x.jsonl" for --metrics',
    "bench -p 2 -o list.json": "Only directory is allowed",
    # models
    **{
        f"estimate -p 1 -m 3 --model their_model{name}": words
        for name, words in {
            "": "write it as module:function",
            ":absent": "has no attribute 'absent'",
            ":something": "it must be a function that returns",
            ":inputs_only": "Tensor; give one micro-batch",
            ":no_targets": "loss_fn is called with outputs and targets",
            ":no_count": "a model given as a builder needs n_layers",
            ":one_module": "a Linear cannot be cut into layers",
        }.items()
    },
}
WITH_TORCH = re.compile(
    r"bench|(estimate|profile) .*(their_model|size)|train .*(Z|si|mem|co|da|de|mo)"
)
"""What is found wrong once torch is loaded: without it, that is missing."""
PYTHON_WORDS = r"Traceback|NoneType|<class|Error parsing|invalid literal"


@pytest.fixture
def refused(zbpp):
    """Run a wrong line; it prints one line on stderr, which is the result."""
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")

    def run(line):
        assert zbpp(line, code=2) == ""
        assert zbpp.err.startswith("zbpp: ")
        assert zbpp.err.count("\n") <= 2 and len(zbpp.err) < 400, zbpp.err
        assert not re.search(PYTHON_WORDS, zbpp.err)
        assert zbpp.files() == FILES.keys()
        return zbpp.err

    return run


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_is_refused_in_one_line(refused, line):
    if WITH_TORCH.match(line):
        pytest.importorskip("torch")
    assert WRONG[line] in refused(line)


@pytest.mark.parametrize(
    "costs", ['{"f": 1e100, "b": 1e100}', '{"optimizer": 1e16}', '{"w": 1e-100}']
)
def test_times_far_apart_are_shown_without_a_picture(zbpp, costs):
    Path("far.json").write_text(costs)
    out = zbpp("show ZBV -p 2 -m 3 --costs far.json")
    assert "nan" not in out and "bubble rate" in out
    assert ("(no picture: the longest job takes 1e+16" in out) == ("16" in costs)


def test_a_wrong_schedule_file_shows_the_place(zbpp):
    zbpp("plan ZBH1 -p 2 -m 3 -o plan.json")
    text = Path("plan.json").read_text()
    Path("plan.json").write_text(text.replace("0B0", "0B1", 1))
    zbpp("show plan.json", code=2)
    first, *grid = zbpp.err.splitlines()
    assert first.startswith("zbpp: plan.json: row 0, column")
    assert any("^" in line for line in grid)
    Path("plan.json").write_text(text)
    zbpp("plan plan.json -o other.json --recompute auto", code=2)
    assert "are given" in zbpp.err
