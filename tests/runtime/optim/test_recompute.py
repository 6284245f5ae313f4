"""Every optimizer of torch that treats parameters one by one is rolled back exactly."""

from typing import Any

import pytest
import torch
from rollback_checks import (
    OPTIMIZERS,
    check,
    growths,
    live_bytes,
    make,
    stepped_once,
)
from stock_optimizers import Counting

from zbpp.runtime.optim import rollback
from zbpp.runtime.optim.rollback import DeferredStep, SnapshotStep, can_defer


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bucket", [1, 100, 2**22])
def test_deferred(name: str, bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollback, "_BUCKET_BYTES", {"cpu": bucket})
    assert can_defer(make(OPTIMIZERS[name]))
    check(OPTIMIZERS[name], DeferredStep)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_snapshot(name: str) -> None:
    check(OPTIMIZERS[name], SnapshotStep)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="a newer torch has it")
@pytest.mark.parametrize("kind", [DeferredStep, SnapshotStep])
def test_muon_takes_matrices(kind: type[Any]) -> None:
    check(lambda p: torch.optim.Muon(p, lr=0.01), kind, shapes=((7, 5), (4, 4), (3, 9)))


def test_what_cannot_be_deferred() -> None:
    class Own(torch.optim.AdamW):
        pass

    assert not can_defer(make(lambda p: Own(p, lr=0.1)))
    assert not can_defer(make(lambda p: Counting(p, lr=0.1)))
    assert not can_defer(make(lambda p: torch.optim.LBFGS(p)))
    replaced = make(lambda p: torch.optim.SGD(p, lr=0.1))
    replaced.step = lambda: None
    assert not can_defer(replaced)
    scheduled = make(lambda p: torch.optim.SGD(p, lr=0.1))
    torch.optim.lr_scheduler.StepLR(scheduled, 2)
    assert can_defer(scheduled)


@pytest.mark.slow
def test_deferred_keeps_one_copy_of_the_parameters_and_no_more() -> None:
    deferred = DeferredStep(stepped_once(100))
    before = live_bytes()
    for growth in growths(deferred, before):
        assert growth == 4 * 1000 * 100 * 4
    assert live_bytes() - before == 4 * 1000 * 100 * 4
