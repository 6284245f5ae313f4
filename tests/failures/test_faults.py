"""A rank fails at any place of a step: all name it, all end, all that was saved stays.

Processes are forked; some that outlive their errors are of the pool.
"""

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import small
import torch
from faulty_training import (
    INF,
    SPIKE,
    Events,
    assert_whole,
    batch,
    make,
    train,
)
from pool import Pool
from ranks import Ranks, end_of
from torch import Tensor, nn

import zbpp
from zbpp.cli import main
from zbpp.runtime import PeerError
from zbpp.runtime.testing import inject

pytestmark = pytest.mark.dist
ERRORS = {
    "raise": "RuntimeError: a fault that the test asks for",
    "memory": "OutOfMemoryError: memory has run out, as the test asks",
    "int": "KeyboardInterrupt",
}


class Fault(NamedTuple):
    """A fault of ``rank`` at a job of step ``step``, or at a part of its validation.

    ``named`` is the place in the other rank's text, ``events`` are of the gradients.
    """

    mode: str
    rank: int
    place: str
    named: str
    events: Events = ()
    step: int = 3


FAULTS = [
    Fault("ZBH1", 0, "0F0", "0F0"),
    Fault("1F1B", 1, "1F3", "1F3"),
    Fault("ZBV", 1, "1B1", "1B1"),
    Fault("1F1B", 1, "1BW2", "1BW2"),
    Fault("ZBV", 0, "0W3", "0W3"),
    Fault("ZBV", 0, "O", "O"),
    Fault("ZBH1", 1, "V", "V"),
    Fault("ZBH2", 0, "commit", "V"),
    Fault("ZBH1", 0, "undo", "V", ((2, INF),)),
    Fault("ZBH2", 1, "redo", "V", ((2, SPIKE),)),
    Fault("ZBH1", 0, "replay", "step 3", ((2, SPIKE),)),
    # in the save after step 3, which validates it
    Fault("ZBV", 0, "undo", "step 3", ((3, INF),)),
    Fault("ZBH1", 1, "redo", "reduce the gradient norm", ((3, SPIKE),)),
]
ROWS = [
    *(([*ERRORS][i % len(ERRORS)], fault) for i, fault in enumerate(FAULTS)),
    *((("term", "kill")[i % 2], fault) for i, fault in enumerate(FAULTS[::2])),
]
QUICK, BY_NIGHT = {"0F0", "O", "undo"}, {"1F3", "1B1", "1BW2", "0W3"}
"""Places by default, and those that are passes as others are."""


def marks_of(fault: Fault) -> list[Any]:
    slow = [pytest.mark.slow] * (fault.place not in QUICK)
    return slow + [pytest.mark.nightly] * (fault.place in BY_NIGHT)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param(
            kind,
            fault,
            marks=marks_of(fault),
            id=f"{kind} at {fault.place} of {fault.mode}",
        )
        for kind, fault in ROWS
    ],
)
def test_all_ranks_name_a_fault_and_checkpoints_stay(
    kind: str, fault: Fault, tmp_path: Path
) -> None:
    text = f"{kind}:{fault.rank}:{fault.step}:{fault.place}"
    ends = end_of(train, 2, fault.mode, text, fault.events, str(tmp_path))
    assert_whole(tmp_path, fault.mode, fault.events, 4 if kind == "term" else 2)
    if kind == "term":  # it ends the loop after a save
        assert [(end.code, end.value) for end in ends] == [(0, 4)] * 2
        return
    failed, other = ends[fault.rank], ends[1 - fault.rank]
    assert f"PeerError: stage {1 - fault.rank} " in other.words and other.code == 1
    if kind == "kill":
        assert (failed.code, failed.words) == (-signal.SIGKILL, "")
        cause = f"rank {fault.rank} has left no word"
    else:
        assert failed.code == 1 and ERRORS[kind] in failed.words
        named = fault.named if kind != "int" else "step 3"
        cause = f"rank {fault.rank} failed first, in {named}"
        assert ERRORS[kind] in other.words
    assert other.words.count(cause) == 1


def test_a_script_ends_with_the_cause_on_all_ranks() -> None:
    """Rank 0 has no channel to the rank that fails, and names it all the same."""
    ends = end_of(train, 3, "ZBH1", "raise:2:1:2F0", (), "")
    for end in ends:
        cause = "rank 2 failed first, in 2F0: RuntimeError: a fault"
        assert end.code == 1 and end.words.count(cause) == 1, end.words


@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_as_long_as_asked(tmp_path: Path) -> None:
    limits = {"execution": zbpp.Execution(timeout_s=6.0, first_timeout_s=100.0)}
    with Ranks(train, 2, "ZBV", "stop:1:3:1F0", (), str(tmp_path), limits) as ranks:
        (end,) = ranks.wait(0)
    assert end.code == 1
    assert "from stage 1: no answer in 6 s; rank 1 has left no word" in end.words
    assert_whole(tmp_path, "ZBV", (), 2)


def test_a_rank_that_never_starts_ends_the_wait() -> None:
    limits = {"execution": zbpp.Execution(first_timeout_s=1.0)}
    with Ranks(train, 1, "ZBH1", "raise:9:9:O", (), "", limits, world=3) as ranks:
        (end,) = ranks.wait()
    words = "PeerError: rank 0 does not reach the others at the start: "
    assert end.code == 1 and words in end.words


def test_too_many_skipped_steps_end_all_ranks(tmp_path: Path) -> None:
    events = tuple((step, INF) for step in range(1, 6))
    more = {"step": zbpp.StepPolicy(max_consecutive_skips=2)}
    for end in end_of(train, 2, "ZBV", "", events, str(tmp_path), more):
        assert end.code == 1 and "NonFiniteError: 2 step(s)" in end.words
    assert_whole(tmp_path, "ZBV", events, 2)


class Acts(nn.Linear):
    """Calls a function with the number of its forward in this process, from 1."""

    n = 0

    def __init__(self, act: Callable[[int], object]) -> None:
        super().__init__(4, 4)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        self.act(self.n)
        return super().forward(x)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.005)


def fail_one_after_the_other(folder: str) -> str:
    """Rank 2 fails, then rank 0; rank 1 waits for them only then."""
    rank, marks = torch.distributed.get_rank(), [Path(folder, str(i)) for i in range(3)]

    def act(n: int) -> None:
        if rank == 0 and n == 3:
            wait_for(marks[2])
            raise OSError("the second")
        if rank == 1 and n == 2:
            wait_for(marks[0])
        if rank == 2:
            raise ValueError("the first")

    pipeline = small.make([Acts(act) for _ in range(3)])
    try:
        pipeline.step(*torch.ones(2, 4, 4))
    except (OSError, ValueError, PeerError) as error:
        marks[rank].touch()
        return str(error)
    return ""


def test_the_first_of_two_causes_is_named(pool: Pool, tmp_path: Path) -> None:
    first, last, second = pool.run(fail_one_after_the_other, 3, str(tmp_path))
    assert (first, second) == ("the second", "the first")
    assert "rank 2 failed first, in 2F0: ValueError: the first" in last


def call_apart(steps: bool, timeout_s: float) -> str:
    """Rank 0 evaluates; rank 1 takes a step, or does nothing."""
    limits = zbpp.Execution(timeout_s=timeout_s, first_timeout_s=100.0)
    pipeline, words = make("1F1B", None, execution=limits), ""
    pipeline.step(*batch(0))  # the first one has time
    try:
        if pipeline.rank == 0:
            pipeline.evaluate(*batch(3))
        elif steps:
            pipeline.step(*batch(3))
    except PeerError as error:
        words = str(error)
    torch.distributed.barrier()
    return words


def test_an_evaluation_that_other_ranks_skip_is_an_error(pool: Pool) -> None:
    first, _ = pool.run(call_apart, 2, False, 1.0)
    assert "rank 1 has left no word" in first
    assert "every rank must call evaluate()" in first


@pytest.mark.slow
def test_an_evaluation_during_a_step_of_other_ranks_is_an_error(pool: Pool) -> None:
    """The activations would fit, so that they must not be taken for the step's."""
    for words in pool.run(call_apart, 2, True, 5.0):
        assert "all ranks wait (rank 0: evaluate, rank 1: step 1)" in words


def fail_outside_of_steps() -> list[str]:
    pipeline, words = make("1F1B", None), []
    inputs, targets = batch(0)
    if pipeline.rank == 0:
        with pytest.raises(ValueError, match="0 samples for") as refused:
            pipeline.step(inputs[:0], targets[:0])
        words.append(str(refused.value))
    pipeline.step(inputs, targets)  # the refused batch was no failure
    try:
        with pipeline:
            if pipeline.rank == 1:
                raise OSError("no room\nat all")
            pipeline.step(inputs, targets)
    except (OSError, PeerError) as error:
        words.append(str(error))
    return words


def test_an_error_of_the_script_is_named(pool: Pool) -> None:
    first, _ = pool.run(fail_outside_of_steps, 2)
    assert first[1].endswith("failed first, in code outside of steps: OSError: no room")


def train_by_command(fault: str) -> None:
    """``zbpp train`` as torchrun starts it, with a fault."""
    words = "--steps 3 --stages 2 --microbatches 4 --microbatch_size 1 --seq 16"
    inject(fault)
    main(["train", "ZBH1", *words.split(), "--size=tiny", f"--data={__file__}"])


@pytest.mark.slow
def test_a_command_ends_with_one_line_of_its_cause() -> None:
    other, end = end_of(train_by_command, 2, "raise:1:2:1F3")
    assert (end.code, other.code) == (1, 1)
    last = end.words.splitlines()[-1]
    assert last.startswith(f"zbpp: rank 1: {ERRORS['raise']} (in 1F3")
    assert other.words.splitlines()[-1].count("rank 1 failed first, in 1F3") == 1
    assert end.place == 0, "torchrun blames the rank that ends first"
