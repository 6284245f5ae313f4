"""A training is planned once, wherever it is started, and leaves no process."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import popen_forkserver

import psutil
import pytest
from fake_clock import FakeClock

from zbpp.planning import Plan, PlanRequest, make_plan
from zbpp.runtime import PeerError
from zbpp.training import launch as launching
from zbpp.training import start as starting
from zbpp.training.launch import launch
from zbpp.training.options import Train


@pytest.fixture
def plans(monkeypatch):
    made = []

    def count(request: PlanRequest) -> Plan:
        plan = make_plan(request)
        made.append(plan.schedule.orders)
        return plan

    monkeypatch.setattr("zbpp.training.setup.make_plan", count)
    return made


def test_the_plan_that_is_checked_is_handed_on(monkeypatch, plans):
    handed = []
    monkeypatch.setattr(
        starting, "launch", lambda _, args, *__, **___: handed.append(args)
    )
    starting.start(Train(steps=1))
    assert [args[1].schedule.orders for args in handed] == plans != []


def test_a_process_of_torchrun_plans_once(monkeypatch, plans):
    handed = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(starting, "train", lambda *args: handed.append(args))
    monkeypatch.setattr(starting.os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="0"):
        starting.start(Train(steps=1))
    assert [args[1].schedule.orders for args in handed] == plans != []


def test_a_worker_ends_when_its_starter_is_gone() -> None:
    """As torchrun's agent may be killed; the worker holds the pipe until its end."""
    worker = (
        "import sys, time\n"
        "from zbpp.training.launch import leave_with_parent\n"
        "leave_with_parent(poll_s=0.01)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    starter = (
        "import subprocess, sys\n"
        f"run = subprocess.Popen([sys.executable, '-c', {worker!r}],\n"
        "                       stdout=subprocess.PIPE)\n"
        "run.stdout.readline()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", starter], stderr=subprocess.PIPE, text=True, timeout=200
    )
    assert "that has started it is gone; it ends" in ended.stderr


@pytest.mark.parametrize(
    ("cause", "is_victim"), [(PeerError("rank 1 is gone"), True), (OSError(), False)]
)
def test_who_has_lost_its_peer_ends_behind_it(monkeypatch, cause, is_victim):
    """The process that ends first is told to be the cause."""
    clock = FakeClock()
    monkeypatch.setattr(launching, "time", clock)
    monkeypatch.setattr(launching, "leave_with_parent", lambda: None)
    monkeypatch.setattr(launching.os, "_exit", sys.exit)
    monkeypatch.setenv("RANK", "0")
    began = clock.now

    def fail() -> None:
        raise cause

    with pytest.raises(SystemExit, match="1"):
        launching.run_launched(fail)
    assert (clock.now > began) is is_victim


@pytest.mark.dist
@pytest.mark.parametrize(
    ("number", "error", "stops_itself"),
    [(signal.SIGTERM, SystemExit, False), (signal.SIGINT, KeyboardInterrupt, True)],
)
def test_a_signal_while_a_worker_is_started_leaves_none(
    monkeypatch, number, error, stops_itself
):
    """It comes when the first process runs and nobody has noted it yet."""
    started = []
    of_python = popen_forkserver.Popen._launch

    def interrupted(popen, process):
        of_python(popen, process)
        started.append(psutil.Process(popen.pid))
        if len(started) == 1:
            os.kill(os.getpid(), number)
            for _ in range(100):  # a handler in Python runs between two steps
                pass

    monkeypatch.setattr(popen_forkserver.Popen, "_launch", interrupted)
    with pytest.raises(error):
        launch(time.sleep, (600,), 2, device="cpu", stops_itself=stops_itself)
    assert started and not any(process.is_running() for process in started)
