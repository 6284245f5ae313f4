"""Bubbles of torch's schedules, from passes whose times are known to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_clock import FakeClock

from zbpp.bench import peer_times
from zbpp.bench.contender import Measured, measured_of
from zbpp.bench.peer_times import PeerTimes
from zbpp.core import Placement


class Stage:
    """One of torch's, as its schedules call it; its passes take 2, 5, 3 and 2 s."""

    stage_index = 0

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock

    def forward_one_chunk(self, index: int, args: Any, kwargs: Any = None) -> str:
        self.clock.sleep(2)
        return f"outputs of {index}"

    def backward_one_chunk(
        self, index: int, loss: Any = None, full_backward: bool = True
    ) -> None:
        self.clock.sleep(5 if full_backward else 3)

    def backward_weight_one_chunk(self, index: int, last_backward: bool) -> None:
        self.clock.sleep(2)


class OtherStage(Stage):
    """Of a torch whose backward is told in another way what to do."""

    def backward_one_chunk(self, index: int, **how: bool) -> None:  # type: ignore[override]
        super().backward_one_chunk(index)


def step(
    stage: Stage, times: PeerTimes, loss: Callable[[Callable[[], None]], None]
) -> None:
    """F0, F1, BW0, B1, W1, O; 7 s of waiting after each F."""
    clock = stage.clock
    times.begin()
    for index in range(2):
        assert stage.forward_one_chunk(index, ()) == f"outputs of {index}"
        loss(lambda: clock.sleep(1))
        clock.sleep(7)
    stage.backward_one_chunk(0, loss=None)
    stage.backward_one_chunk(1, full_backward=False)
    stage.backward_weight_one_chunk(1, last_backward=True)
    times.step(lambda: clock.sleep(4))


def measured(stage: Stage, *, with_loss: bool = True) -> Measured | None:
    times = PeerTimes(torch.device("cpu"), 0)
    times.clock.now = lambda: stage.clock.now
    loss = times.loss if with_loss else lambda run: run()
    step(stage, times, loss)
    with times.on([stage]) as noted:
        if not noted:
            return None
        step(stage, times, loss)
    step(stage, times, loss)  # once more as it was
    sizes = {"placement": Placement.single(1), "n_microbatches": 2}
    (timeline,) = times.timelines(10, name="1F1B", **sizes)
    return measured_of([timeline])


def test_bubble_is_the_time_outside_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Span 30 s, work 16 s. The controls: a loss that is no part of its F, and a torch
    whose passes cannot be told."""
    monkeypatch.setattr(peer_times, "gather", lambda thing: [thing])
    found = measured(Stage(FakeClock()))
    assert found is not None
    jobs = [(str(one.job), one.start, one.end) for one in found.timeline.rows[0]]
    passes = [("0F0", 0, 3), ("0F1", 10, 13), ("0BW0", 20, 25), ("0B1", 25, 28)]
    rest = [("0W1", 28, 30), ("O", 30, 34)]
    assert jobs == [(job, 1e3 * a, 1e3 * b) for job, a, b in passes + rest]
    assert found.bubble == pytest.approx(14 / 30)
    assert found.bubble_by_stage == (pytest.approx(14 / 30),)
    without = measured(Stage(FakeClock()), with_loss=False)
    assert without is not None and without.bubble == pytest.approx(16 / 30)
    assert measured(OtherStage(FakeClock())) is None
