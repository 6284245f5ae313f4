"""Micro-batches are copied to a GPU ahead of their forwards, each one once."""

import pytest
import torch
from fake_stream import FakeUploadStream
from small_model import assert_same, train
from trained_modes import MODES

from zbpp.runtime import microbatches, stage
from zbpp.runtime.microbatches import Uploads
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.values import mapped

CPU = torch.device("cpu")


def parts(n: int) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.full((2,), i),) for i in range(n)]


def log_of(n: int, taken: list[int]) -> FakeUploadStream:
    stream = FakeUploadStream()
    on_the_way = Uploads(CPU, mapped, stream)
    on_the_way.begin(parts(n))
    for i in taken:
        (x,) = on_the_way.take(i)
        assert x.tolist() == [i, i]
        x.add_(1)  # as a layer that works in place
        stream.log.append(("F", i))
    return stream


def test_copies_are_two_forwards_ahead_and_each_forward_waits_for_its_own() -> None:
    """
    copies   0 1 . 2 . 3 . . .
    forwards     F0  F1  F2 F3
    """
    stream = log_of(4, [0, 1, 2, 3])
    assert stream.log == [
        ("copy", 0),
        ("copy", 1),
        ("wait", 0),
        ("take", 0),
        ("copy", 2),
        ("F", 0),
        ("wait", 1),
        ("take", 1),
        ("copy", 3),
        ("F", 1),
        ("wait", 2),
        ("take", 2),
        ("F", 2),
        ("wait", 3),
        ("take", 3),
        ("F", 3),
    ]
    assert stream.most_held == microbatches.AHEAD


def test_a_forward_that_runs_again_gets_a_new_copy() -> None:
    log = log_of(4, [0, 1, 0, 1, 2, 3]).log
    assert [i for what, i in log if what == "F"] == [0, 1, 0, 1, 2, 3]
    assert log.count(("copy", 0)) == 2 and log.count(("copy", 3)) == 1


def test_what_is_in_containers_is_copied_and_an_empty_one_waits_for_nothing() -> None:
    stream = FakeUploadStream()
    on_the_way = Uploads(CPU, map_tensors, stream)
    on_the_way.begin([{"x": torch.zeros(1), "n": 3}, {"n": 4}])
    assert on_the_way.take(0)["n"] == 3 and on_the_way.take(1) == {"n": 4}
    assert stream.log == [("copy", 0), ("wait", 0), ("take", 0)]


@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_steps_are_the_same_and_copy_every_micro_batch_once(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mode in MODES
    plain = train(mode, 2, clip_grad_norm=0.5)
    streams: list[FakeUploadStream] = []

    def ahead(device: torch.device) -> tuple[Uploads, Uploads]:
        streams.extend((FakeUploadStream(), FakeUploadStream()))
        return (
            Uploads(device, mapped, streams[-2]),
            Uploads(device, map_tensors, streams[-1]),
        )

    monkeypatch.setattr(stage, "uploads_to", ahead)
    losses, validation, parameters = train(mode, 2, clip_grad_norm=0.5)
    assert (losses, validation) == plain[:2]
    assert_same(parameters, plain[2])
    busy = [one for one in streams if one.log]
    assert len(busy) == 2, "inputs and targets"
    for one in busy:
        copies = sum(what == "copy" for what, _ in one.log)
        waits = sum(what == "wait" for what, _ in one.log)
        replayed = waits - (3 * 6 + 3)  # three steps, and an evaluation
        assert replayed >= 0 and copies <= waits + replayed
