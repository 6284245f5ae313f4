"""Headers come when shapes change, and only then."""

from collections import Counter
from functools import partial
from typing import Any

import masked_model
import pytest
import torch
from masked_model import M, cut, make
from pool import Pool
from small_model import batch, make_pipeline, refusal
from torch import Tensor

from zbpp.core import Value, What
from zbpp.runtime.comm import shapes
from zbpp.runtime.comm.channels import HEADER, KINDS
from zbpp.runtime.comm.header import spec_of
from zbpp.runtime.comm.shapes import Shapes


def inputs(*lengths: int) -> list[tuple[Tensor]]:
    return [(torch.ones(2, length),) for length in lengths]


def test_kinds_are_numbered_by_what_they_look_like() -> None:
    known = Shapes()
    assert known.number(inputs(3, 3, 4)) == [0, 0, 0, 1]
    assert known.number(inputs(4, 3, 5)) == [0, 1, 0, 2]
    whole = [(torch.ones(2, 3, dtype=torch.int64),)]
    assert known.number(whole) == [0, 3]


def test_too_many_kinds_are_forgotten_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "MOST_KINDS", 3)
    first, second = Shapes(), Shapes()
    value = Value(What.ACTIVATION, 0, 0)
    for length in range(20):
        told = first.number(inputs(length, length))
        for end in (first, second):
            end.begin()
            end.tell(told)
            assert end.known(value) is None
            end.learn(value, spec_of(value, (torch.ones(length),)))
            assert end.known(value) is not None
            assert len(end._specs) <= 4
    assert first._specs == second._specs


def count_messages(lengths: list[list[int]]) -> tuple[list[Counter[str]], list[float]]:
    """Messages that this rank sends in each step, by kind; losses."""
    pipeline = make_pipeline("1F1B", None)
    (executor,) = pipeline.stages.executors.values()
    wire = executor.transport._wire
    sent: Counter[str] = Counter()
    names = {HEADER: "header", KINDS: "kinds"}

    def send(inner: Any, value: Value, *args: Any, slot: int) -> None:
        sent[names.get(slot, "tensor")] += 1
        inner(value, *args, slot=slot)

    wire.send = partial(send, wire.send)
    counts, losses = [], []
    for step, own in enumerate(lengths):
        sent.clear()
        parts = [x.split(2) for x in batch(step)]
        cut = [[x[:, :n] for x, n in zip(part, own, strict=True)] for part in parts]
        losses.append(pipeline.step(*cut).loss)
        counts.append(Counter(sent))
    return counts, losses


STEPS = [[5] * 6, [5] * 6, [3] * 6, [5] * 6, [3, 5, 4, 4, 5, 3], [4, 4, 3, 5, 5, 3]]


@pytest.mark.dist
def test_a_header_for_each_new_kind_and_no_other(pool: Pool) -> None:
    (first, losses), (last, others) = pool.run(count_messages, 2, STEPS)
    assert [step["header"] for step in first] == [1, 0, 1, 0, 1, 0]
    assert all(step["kinds"] == 1 and step["tensor"] == 6 for step in first)
    assert all(step == {"tensor": 6} for step in last)  # gradients need no word
    assert losses == others == count_alone()


def count_alone() -> list[float]:
    pipeline = make_pipeline("1F1B", 1)
    losses = []
    for step, own in enumerate(STEPS):
        parts = [x.split(2) for x in batch(step)]
        cut = [[x[:, :n] for x, n in zip(part, own, strict=True)] for part in parts]
        losses.append(pipeline.step(*cut).loss)
    return losses


def forget_a_change() -> str:
    """All micro-batches are said to be of one kind, so that no header is sent again."""
    known = Shapes.number
    Shapes.number = lambda self, inputs: [0] * (len(inputs) + 1)
    try:
        pipeline = make("1F1B", None, timeout_s=5, first_timeout_s=100)
        assert len({masked_model.batch(s)["labels"].shape for s in range(2)}) == 2
        pipeline.step(*cut(masked_model.batch(0)))
        pipeline.step(*cut(masked_model.batch(1)))
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        Shapes.number = known
    return "nothing"


@pytest.mark.dist
def test_a_header_that_is_not_sent_again_is_seen(pool: Pool) -> None:
    for words in pool.run(forget_a_change, 2):
        assert "with inputs of the same shapes it was" in words


def ragged() -> tuple[list[float], float]:
    """Every micro-batch of its own length, in another order each step."""
    pipeline = make("ZBV", None if torch.distributed.is_initialized() else 2)
    losses = []
    for step in range(4):
        parts = [cut(masked_model.batch(10 * step + i, 2)) for i in range(M)]
        losses.append(pipeline.step([x for x, _ in parts], [t for _, t in parts]).loss)
    return losses, pipeline.evaluate([x for x, _ in parts], [t for _, t in parts])


@pytest.mark.dist
def test_micro_batches_of_several_lengths_in_a_step(pool: Pool) -> None:
    assert pool.run(ragged, 2) == [ragged()] * 2


def test_mixed_up_samples_are_refused() -> None:
    inputs, labels = cut(masked_model.batch(0))
    inputs["mask"] = inputs["mask"][:4]
    pipeline = make("1F1B", 2)
    words = "inputs is a dict of tensors of [8, 4, 8] samples; they must have the same"
    assert words in refusal(pipeline.step, inputs, labels)
