"""Fixtures of the tests of emulated runs."""

import pytest
from fake_clock import FakeClock

from zbpp.emulation import layers, network


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Time stands still, but for what waits."""
    clock = FakeClock()
    for module in (layers, network):
        monkeypatch.setattr(module, "time", clock)
    return clock
