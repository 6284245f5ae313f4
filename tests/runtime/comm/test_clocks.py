"""Clocks of two machines: one is ahead, and a timeline does not show it."""

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn

from zbpp import diagnostics
from zbpp.core import Pass, PassKind, Timeline
from zbpp.pipeline import Pipeline
from zbpp.runtime.comm.clocks import compare_clocks
from zbpp.simulator import step_time, trace_events

AHEAD_S = 1000.0


class Machines:
    """Processes that come to gathers one after the other, on clocks of their own."""

    def __init__(self, ahead_s: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ahead_s = 50.0, ahead_s
        monkeypatch.setattr(time, "perf_counter", self.read)
        self.rank = 0

    def read(self) -> float:
        self.now += 0.001
        return self.now + self.ahead_s[self.rank]


def rounds(machines: Machines, n: int) -> Iterator[list[tuple[float, float]]]:
    """The readings of each process; all starts come before all ends."""
    ranks = range(len(machines.ahead_s))
    for turn in range(n):
        order = ranks if turn % 2 == 0 else reversed(ranks)
        read = {}
        for rank in order:
            machines.rank = rank
            read[rank] = [machines.read()]
        machines.now += turn // 2  # in later rounds somebody is late
        for rank in ranks:
            machines.rank = rank
            read[rank].append(machines.read())
        yield [(read[rank][0], read[rank][1]) for rank in ranks]


def test_the_difference_lies_within_the_error(monkeypatch) -> None:
    machines = Machines([0.0, AHEAD_S, AHEAD_S, -3.0], monkeypatch)
    told = list(rounds(machines, 4))
    by_rank = [list(row) for row in zip(*told, strict=True)]
    found = compare_clocks(
        lambda thing: by_rank if thing is not None else [], ["a", "b", "b", "c"], 4
    )
    assert 0 < found.error_s < 0.01
    for ahead, true in zip(found.ahead_s, machines.ahead_s, strict=True):
        assert abs(ahead - true) <= found.error_s
    assert found.ahead_s[1] == found.ahead_s[2]  # they read one clock


def test_one_clock_is_not_compared() -> None:
    found = compare_clocks(lambda _: pytest.fail("measured"), ["a", "a"])
    assert found.ahead_s == (0.0, 0.0) and found.error_s == 0.0


def timelines() -> tuple[Timeline, Timeline]:
    """Of a step on two machines, and the same as if they were one."""
    rank, real = dist.get_rank(), time.perf_counter
    layers = [nn.Linear(2, 2) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: real() + rank * AHEAD_S)
        with Pipeline(
            layers,
            loss_fn=nn.functional.mse_loss,
            optimizer=None,
            schedule="ZBH1",
            n_microbatches=2,
        ) as pipeline:
            pipeline.step(torch.ones(2, 2), torch.zeros(2, 2))
            wrong = diagnostics.timeline(pipeline)
            patch.setattr(diagnostics, "clock_name", lambda: f"machine {rank}")
            return diagnostics.timeline(pipeline), wrong


@pytest.mark.slow
def test_a_timeline_has_one_clock(pool: Pool) -> None:
    """A job starts when the one that it waits for has ended, within the error."""
    found, wrong = pool.run(timelines, 2)[0]
    starts, ends = (
        {slot.job: getattr(slot, name) for row in found.rows for slot in row}
        for name in ("start", "end")
    )
    assert 0 < found.clock_error < AHEAD_S / 4
    for i in range(2):
        down = Pass(PassKind.F, 0, i), Pass(PassKind.F, 1, i)
        up = Pass(PassKind.B, 1, i), Pass(PassKind.B, 0, i)
        for before, after in (down, up):
            assert starts[after] >= ends[before] - found.clock_error
    assert wrong.clock_error == 0 and step_time(wrong) > AHEAD_S / 2  # the control
    assert step_time(found) < AHEAD_S / 2
    names = [event["args"].get("name", "") for event in trace_events(found)[:1]]
    assert "clocks of the stages within" in names[0]
