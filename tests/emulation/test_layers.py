"""Emulated messages: they wait for their link, and stop neither stage."""

import time

import pytest
import torch
from fake_clock import FakeClock
from pool import Pool

from zbpp.core import (
    Costs,
    Pass,
    PassKind,
    Placement,
    Value,
    What,
)
from zbpp.emulation import run
from zbpp.emulation.layers import EmulatedLayer, sleep_until
from zbpp.emulation.network import DelayedTransport
from zbpp.emulation.run import emulate
from zbpp.pipeline import Pipeline
from zbpp.planning import plan
from zbpp.runtime import WeightQueue
from zbpp.runtime.backward import queue
from zbpp.runtime.comm.local import LocalHub

F, B = PassKind.F, PassKind.B


def transports(comm):
    times = Costs(comm=comm).on(Placement.wave(3))
    locals_ = LocalHub(3).transports()
    return [DelayedTransport(one, times, stage=i) for i, one in enumerate(locals_)]


def travel_ms(
    clock: FakeClock, comm, value: Value, source: int, target: int
) -> tuple[float, float]:
    """Seconds of a send, and from its start to the end of the receive."""
    ends = transports(comm)
    expected = ends[target].post(value, source)
    start = clock.now
    ends[source].send(value, (torch.zeros(1, 1, requires_grad=True),), target)
    sent = clock.now
    kind, step = (F, 1) if value.what is What.ACTIVATION else (B, -1)
    job = Pass(kind, value.chunk + step, value.microbatch)
    (tensor,) = expected.receive(job)
    assert tensor.shape == (1, 1) and tensor.requires_grad
    return (sent - start) * 1e3, (clock.now - start) * 1e3


@pytest.mark.parametrize(
    ("value", "source", "target", "delay"),
    [
        (Value(What.ACTIVATION, 0, 2), 0, 1, 40),
        (Value(What.ACTIVATION, 1, 2), 1, 2, 90),
        (Value(What.ACTIVATION, 4, 2), 1, 0, 40),
        (Value(What.GRADIENT, 2, 2), 2, 1, 90),
        (Value(What.GRADIENT, 5, 2), 0, 1, 40),
    ],
)
def test_a_value_arrives_when_the_delay_of_its_link_is_over(
    clock, value, source, target, delay
):
    sent, arrived = travel_ms(clock, (40.0, 90.0), value, source, target)
    assert sent < 0.01
    assert delay <= arrived < delay + 0.01


def test_without_a_delay_a_value_arrives_at_once(clock):
    _, arrived = travel_ms(clock, 0.0, Value(What.ACTIVATION, 0, 0), 0, 1)
    assert arrived < 0.01


def test_nothing_that_waits_is_early():
    for wait_s in (0.0, 1e-4, 2e-3):
        deadline = time.perf_counter() + wait_s
        sleep_until(deadline)
        assert time.perf_counter() >= deadline


def measured() -> tuple[float, float]:
    """Measured and simulated step of a run with slow messages and a loss."""
    costs = Costs(20, 20, 20, comm=60, loss=10, splits=(True, False))
    schedule = plan("ZBH1", n_stages=2, n_microbatches=3, costs=costs)
    outcome = emulate(schedule, costs, n_steps=3)
    return outcome.step_ms, outcome.simulated_step_ms


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_takes_the_time_of_its_links_and_its_loss(pool: Pool) -> None:
    """Between processes; never less, however busy the machine is.

    The control is the simulated step without delays.
    """
    for step, simulated in pool.run(measured, 2):
        assert step >= simulated - 1
        assert simulated > 1.2 * (3 * 60 + 20 + 40 + 10)


def slept_ms(clock: FakeClock) -> list[float]:
    """Time of F, B and W of a chunk of two layers with unlike times."""
    layers = [EmulatedLayer(0.01, 0.02, 0.04), EmulatedLayer(0.1, 0.2, 0.4)]
    later = WeightQueue()
    x = torch.zeros(1, requires_grad=True)
    took, start = [], clock.now
    with later:
        later.began_s = clock.now
        y = layers[1](layers[0](x))
    took.append(clock.now - start)
    start = later.began_s = clock.now
    y.backward()
    took.append(clock.now - start)
    start = clock.now
    later.run()
    took.append(clock.now - start)
    return [one * 1e3 for one in took]


def test_the_layers_of_a_chunk_sleep_one_after_the_other(clock, monkeypatch):
    monkeypatch.setattr(queue, "time", clock)
    assert slept_ms(clock) == pytest.approx([110, 220, 440], abs=0.1)


def test_the_first_steps_are_not_counted(clock, monkeypatch):
    monkeypatch.setattr(run, "time", clock)
    seconds, step = iter([50, 40, 7, 8, 9]), Pipeline.step

    def take(pipeline: Pipeline, *batch: torch.Tensor) -> object:
        clock.sleep(next(seconds))
        return step(pipeline, *batch)

    monkeypatch.setattr(Pipeline, "step", take)
    outcome = emulate(plan("1F1B", n_stages=1, n_microbatches=1), n_steps=3)
    assert outcome.step_ms == pytest.approx(8000, rel=1e-2)
