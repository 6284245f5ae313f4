"""One of torchrun's processes leaves no orphan and lets the first cause be seen."""

import subprocess
import sys

import pytest
from fake_clock import FakeClock

from zbpp.runtime import PeerError
from zbpp.training import launch as launching


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
