"""Wrong command lines: each is refused in one line that names the mend."""

import json
import re
from importlib.metadata import version
from shlex import split

import pytest

from zbpp.cli import main
from zbpp.cli.parser import application, parse
from zbpp.cli.several import command_words
from zbpp.cli.train import Train
from zbpp.core import read_schedule
from zbpp.planning import plan

FILES = {
    "broken.json": '{"f": 1,',
    "list.json": "[1, 2]",
    "unknown.json": '{"forward": 1}',
    "negative.json": '{"f": -1}',
    "text.json": '{"f": "fast"}',
    "bytes.json": '{"m_b": 1000000000, "m_w": 500000000}',
    "plan.json": '{"format": "zbpp-schedule", "version": 9}',
    "torch.csv": "0F0,0B0",
}
WRONG = {
    # commands
    "": "choose plan, show",
    "traim": 'Did you mean "train"?',
    "polt ZBV -p 2 -m 3": "Available commands: plan, show",
    "messh --devices 2": 'Did you mean "mesh"?',
    "frobnicate": "Available commands: plan, show",
    "--stages 4 show": "Available commands: plan, show",
    "-p 4": "Available commands: plan, show",
    # flags
    "show ZBV --stage 4": "Did you mean --stages?",
    "show ZBV --micro-batches 4": "Did you mean --microbatches?",
    "show ZBV -p 2 -m 3 --memory-limt 3": "Did you mean --memory_limit?",
    "train --pipeline_mode ZBV": "Did you mean --pipeline_schedule_mode?",
    "show ZBV -x 2": "-x. (see zbpp show --help)",
    "show ZBV -p": "-p requires an argument",
    "show ZBV -p 2 -m 3 --effort": "--effort requires an argument",
    "show ZBV --stages --microbatches 3": "--stages requires an argument",
    "show ZBV -p 2 -m 3 --json=perhaps": "--json: unable to convert",
    "show ZBV -p 2 -m 3 --no_json": "--json",
    "plan ZBV -p 2 -m 3": "--out requires an argument",
    "estimate --microbatches 4": "--stages requires an argument",
    "compare -p 4": "--microbatches requires an argument",
    # modes and other bare words
    "show ZBW -p 2 -m 3": "did you mean",
    "plan ZVB -p 2 -m 3 -o x.json": "did you mean",
    "show": "give a schedule file",
    "plan -p 2 -m 3 -o x.json": "--pipeline_schedule_mode requires an argument",
    "show ZBV ZBH1 -p 2 -m 3": "several schedules are named",
    "plan ZBV ZBH1 -p 2 -m 3 -o x.json": "'ZBH1' is one word too many",
    "show ZBV --mode ZBH1 -p 2 -m 3": "one word too many",
    "plan ZBV --mode ZBH1 -p 2 -m 3 -o x.json": "one word too many",
    "mesh --devices 2 -m 3 --layers x.json --tensor_parallel two": "give whole numbers",
    "doctor torch": "zbpp doctor --help",
    # numbers
    "show ZBV --stages four -m 3": "give whole numbers",
    "show ZBV --stages 2.5 -m 3": "give whole numbers",
    "show ZBV --stages -2 -m 3": "at least 1",
    "show ZBV -p 2 -m 0": "at least 1",
    "show ZBV -p 2": "--microbatches is missing",
    "show ZBV -p 2 -m 3 --iterations 0": "at least 1",
    "show ZBV -p 2 -m 3 --data_parallel 0": "--data_parallel is 0; it must be at",
    "show ZBV -p 2 -m 3 --chunks_per_stage 3": "chunks_per_stage i",
    "show VPP -p 2 -m 3 --chunks_per_stage 0": "--chunks_per_stage",
    "train --lr fast": "--lr: unable to convert",
    "train --stages 0": "--stages is 0; it must be at least 1",
    "train --microbatches 0": "--microbatches is 0",
    "train --steps -1": "at least 1",
    "train --lr -1": "--lr is -1.0; it must be at least 0",
    "train --lr nan": "--lr is nan",
    "train --seed -1": "--seed is -1",
    "train --clip_grad_norm nan": "above 0",
    "train --clip_grad_norm -1": "above 0",
    "bench -p 2 -o out --rounds 0": "at least 1",
    "bench -p 1 -o out": "2 or more",
    "estimate -p 2 -m 3 --microbatch_size 0": "at least 1",
    "estimate -p 2 -m 3 --split 3 x": "give whole numbers",
    "profile -o x.json --rounds 0": "at least 1",
    # choices
    "train --dtype fp8": 'Choose from: "fp32", "bf16", "fp16"',
    "train --device gpu": "choose auto, cpu, cuda",
    "show ZBV -p 2 -m 3 --effort most": "fast",
    # limits
    "show ZBV -p 2 -m 3 --memory_limit lots": "40GiB",
    "show ZBV -p 4 -m 8 --memory_limit 0.1": "needs memory",
    "show ZBV -p 2 -m 3 --memory_limit 40GiB": "in bytes",
    "compare -p 2 -m 3 --memory_limit 0.9": "no mode can be had",
    "show ZBV -p 1000000 -m 1000000": "at most",
    "train ZBX": "unknown schedule mode 'ZBX'",
    "train --size tiny --stages 7": "6 layers cannot fill 7 chunks",
    "train --memory_limit 0.5": "over the limit 0.5",
    # files
    "show missing.json": "cannot be read",
    "show plan.json": "'mode' is missing",
    "show torch.csv": "torch.csv: line 1, column 2: no JSON",
    "show ZBV -p 2 -m 3 --costs missing.json": "cannot be read",
    "show ZBV -p 2 -m 3 --costs broken.json": "broken.json",
    "show ZBV -p 2 -m 3 --costs list.json": "list.json",
    "show ZBV -p 2 -m 3 --costs unknown.json": "forward",
    "show ZBV -p 2 -m 3 --costs negative.json": "negative.json",
    "show ZBV -p 2 -m 3 --costs text.json": "text.json",
    "show ZBV -p 2 -m 3 --layers missing.json": "cannot be read",
    "train --costs missing.json": "missing.json: cannot be read",
    "train --data nowhere": "nowhere does not exist",
    # contradictions
    "show ZBV -p 2 -m 3 --split 3,4": "needs --layers",
    "show ZBV -p 2 -m 3 --costs bytes.json --layers bytes.json": "leave --costs out",
    "show ZBV -p 2 -m 3 --shard parameters": "--shard parameters needs replicas",
    "plan ZBV -p 2 -m 3 -o x.json --recompute auto": "needs m_r",
    "plan ZBV -p 2 -m 3 -o x.json --recompute 0,9": "the chunks are 0 to 3",
    "plan ZBV -p 2 -m 3 -o x.json --recompute some": "choose auto, all or none",
    "plan ZBV -p 2 -m 3 -o x.json --recompute all --memory_limit 2": "no m_r",
    "compare -m 3": "--stages requires an argument",
    "compare -p 2 --devices 4 -m 3": "--devices",
    "bench -p 2 -o out --emulate bytes.json --model a:b": "does not go with --emulate",
    # outputs
    "compare -p 4 -m 8 --out x.txt": ".html",
    "plot ZBV -p 2 -m 3 -o x.svg": "plot",
    "show ZBV -p 2 -m 3 -o x.gif": ".svg",
    "show ZBV -p 2 -m 3 -o no/x.html": "there is no folder no",
    "show ZBV -p 2 -m 3 -o .": "it is a folder",
    "plan ZBV -p 2 -m 3 -o no/x.json": "there is no folder no",
    "plan ZBV -p 2 -m 3 -o x.json --csv no/x.csv": "--csv no/x.csv",
    "plan ZBV -p 2 -m 3 -o list.json/x.json": "there is no folder list.json",
    "train --metrics no/x.jsonl": "--metrics no/x.jsonl",
    "train --trace no/x.json": "--trace no/x.json cannot be",
    "profile -o no/x.json": "there is no folder no",
    "bench -p 2 -o list.json": "name a folder",
    # what a profile would not heed
    "profile -o x.json --save_dir out": "zbpp profile",
    "profile -o x.json --metrics out": "zbpp profile",
    "profile -o x.json --steps 3": "zbpp profile",
    "profile -o x.json --model a:b --layers bytes.json": "does not go with --model",
    "train --model a:b": "hf:PATH",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


SAID_BY_TORCH = {
    "bench -p 2 -o out --rounds 0",
    "bench -p 1 -o out",
    "estimate -p 2 -m 3 --microbatch_size 0",
    "train --device gpu",
    "train ZBX",
    "train --size tiny --stages 7",
    "train --memory_limit 0.5",
    "train --costs missing.json",
    "train --data nowhere",
    "bench -p 2 -o out --emulate bytes.json --model a:b",
    "bench -p 2 -o list.json",
    "train --model a:b",
}
"""What is found wrong once torch is loaded: without it, that is missing."""


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_is_refused_in_one_line(line, folder, capsys):
    if line in SAID_BY_TORCH:
        pytest.importorskip("torch")
    assert main(split(line)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("zbpp: ")
    assert captured.err.count("\n") <= 2, captured.err
    assert len(captured.err) < 400
    words = r"Traceback|NoneType|<class|Error parsing|invalid literal"
    assert not re.search(words, captured.err)
    assert WRONG[line] in captured.err
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)


def test_modes_stand_bare_and_flags_have_short_spellings(folder, capsys):
    expected = plan("ZBV", n_stages=2, n_microbatches=4)
    for line in (
        "plan ZBV -p 2 -m 4 -o x.json",
        "plan --mode zb-v --stages=2 --microbatches=4 --out=x.json",
        "plan --stages 2 --microbatches 4 ZBV --out x.json",
    ):
        assert main(split(line)) == 0
        assert read_schedule(folder / "x.json") == expected
        (folder / "x.json").unlink()
    capsys.readouterr()
    assert main(split("train 1F1B --clip_grad_norm 0")) == 2
    assert capsys.readouterr().err.startswith("zbpp: --clip_grad_norm is 0.0")
    assert main(split("show ZBV -p 2 -m 3 --no-enable_optimizer-post_validation")) == 0


HELP = ("plan", "show", "compare", "mesh", "train", "bench", "profile", "estimate")


def help_of(capsys, *words):
    assert main([*words, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", [*HELP, "doctor"])
def test_the_help_of_a_command_fits_on_two_screens(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = help_of(capsys, command).splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 80
    assert f"│{command} " in help_of(capsys)


def test_compare_takes_some_modes(folder, capsys):
    assert main(split("compare ZBV 1F1B -p 2 -m 3 --json")) == 0
    (found,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert [row["mode"] for row in found["modes"]] == ["ZBV", "1F1B"]


def trained(words):
    return parse(application({"train": Train}), ["train", *words])


def test_the_last_of_two_equal_flags_counts():
    assert trained(["--steps", "4", "--steps", "5"]).steps == 5


def test_a_command_is_repeated_by_its_words():
    """As processes of a run are started by them."""
    words = split("ZBV --lr 0.1234567890123456 -p 3 --memory_limit 40.3GiB --data a.b")
    command = trained([*words, "--no_enable_optimizer_post_validation"])
    assert trained(command_words(command)[1:]) == command


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"zbpp {version('zbpp')}\n"
