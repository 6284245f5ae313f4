"""Steps of all of torch's optimizers, and of others, are rolled back to the bit."""

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
from torch import nn

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


class CountsItself(torch.optim.SGD):
    """Counts its steps in itself: a number, and a tensor."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.calls = 0
        self.seen = torch.zeros(())

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.seen += 1
        super().step()


def test_a_snapshot_holds_an_optimizers_own_attributes() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = CountsItself([parameter])
    snapshot = SnapshotStep(optimizer)
    parameter.grad = torch.ones(3)
    snapshot.take()
    assert (optimizer.calls, float(optimizer.seen)) == (1, 1.0)
    snapshot.undo()
    assert (optimizer.calls, float(optimizer.seen)) == (0, 0.0)
    assert parameter.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("ends", ["commit", "undo"])
def test_both_steps_of_a_deferred_one_are_taken_by_a_private_optimizer(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own has its groups and its state all the time."""
    optimizer = make(OPTIMIZERS["AdamW {'fused': True}"])
    groups, state = optimizer.param_groups, optimizer.state
    stepped = []
    plain_step = rollback.plain_step

    def note(shadow: Any) -> None:
        assert optimizer.param_groups is groups and optimizer.state is state
        stepped.append(shadow)
        plain_step(shadow)

    monkeypatch.setattr(rollback, "plain_step", note)
    for p in groups[0]["params"]:
        p.grad = torch.ones_like(p)
    deferred = DeferredStep(optimizer)
    deferred.take()
    getattr(deferred, ends)()
    assert stepped and all(shadow is not optimizer for shadow in stepped)
    assert len(state) == (len(groups[0]["params"]) if ends == "commit" else 0)
