"""Emulated messages: they wait for their link, and stop neither stage."""

import json
import subprocess
import sys
import time

import pytest
import torch

from zbpp.core import Costs, Pass, PassKind, Placement, Value, What
from zbpp.emulation.layers import DelayedTransport
from zbpp.runtime.comm.transport import LocalHub

F, B = PassKind.F, PassKind.B


def transports(comm):
    times = Costs(comm=comm).on(Placement.wave(3))
    return [DelayedTransport(one, times) for one in LocalHub(3).transports()]


def travel_ms(comm, value: Value, source: int, target: int) -> tuple[float, float]:
    """How long a send takes, and from its start to the end of the receive."""
    ends = transports(comm)
    start = time.perf_counter()
    ends[source].send(value, (torch.zeros(1, 1, requires_grad=True),), target)
    sent = time.perf_counter()
    kind, step = (F, 1) if value.what is What.ACTIVATION else (B, -1)
    job = Pass(kind, value.chunk + step, value.microbatch)
    (tensor,) = ends[target].receive(value, job)
    arrived = time.perf_counter()
    assert tensor.shape == (1, 1) and tensor.requires_grad
    return (sent - start) * 1e3, (arrived - start) * 1e3


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
    value, source, target, delay
):
    sent, arrived = travel_ms((40.0, 90.0), value, source, target)
    assert sent < delay <= arrived < delay + 500


def test_without_a_delay_a_value_arrives_at_once():
    _, arrived = travel_ms(0.0, Value(What.ACTIVATION, 0, 0), 0, 1)
    assert arrived < 40


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_takes_the_time_of_its_links_and_its_loss(tmp_path):
    """Between processes; the control is the simulated step without delays."""
    costs, metrics = tmp_path / "costs.json", tmp_path / "metrics.json"
    times = {"f": 20, "b": 20, "w": 20, "comm": [60], "loss": 10}
    costs.write_text(json.dumps({**times, "splits": [True, False]}))
    command = [
        *(sys.executable, "-m", "zbpp", "train", "--emulate", costs),
        *("--pipeline_schedule_mode", "ZBH1", "--stages", "2"),
        *("--microbatches", "3", "--steps", "3", "--metrics", metrics),
    ]
    subprocess.run([str(word) for word in command], check=True, timeout=100)
    outcome = json.loads(metrics.read_text())
    simulated = outcome["simulated_step_ms"]
    assert simulated - 1 <= outcome["step_ms"] < simulated * 1.5
    assert simulated > 1.2 * (3 * 60 + 20 + 40 + 10)
