"""Steps of all of torch's optimizers, and of others, are rolled back to the bit."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from outcomes import bytes_of
from stock_optimizers import Counting
from torch import Tensor, nn

from zbpp.runtime.optim import rollback
from zbpp.runtime.optim.rollback import DeferredStep, Rollback, SnapshotStep, can_defer

SHAPES = ((7, 5), (33,), (4, 4), (1,), (20, 3), (23, 13), (1000,))
"""With buckets of 100 bytes, the last two are stepped in pieces."""
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    f"{name} {more}": lambda p, name=name, more=more: getattr(torch.optim, name)(
        p, lr=0.01, **more
    )
    for name, variants in {
        "ASGD": ({}, {"foreach": True}),
        "Adadelta": ({}, {"foreach": True}),
        "Adafactor": ({}, {"foreach": True}),
        "Adagrad": ({}, {"foreach": True}, {"fused": True}),
        "Adam": ({}, {"foreach": True}, {"fused": True}, {"amsgrad": True}),
        "AdamW": ({}, {"foreach": True}, {"fused": True}, {"maximize": True}),
        "Adamax": ({}, {"foreach": True}),
        "NAdam": ({}, {"foreach": True}, {"decoupled_weight_decay": True}),
        "RAdam": ({}, {"foreach": True}),
        "RMSprop": ({"momentum": 0.9, "centered": True}, {"foreach": True}),
        "Rprop": ({}, {"foreach": True}),
        "SGD": ({}, {"momentum": 0.9, "foreach": True},
                {"momentum": 0.9, "nesterov": True, "fused": True}),
    }.items()
    for more in variants
}  # fmt: skip


def make(optimizer: Make, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> Any:
    generator = torch.Generator().manual_seed(0)
    return optimizer(
        [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    )


def give_gradients(optimizer: torch.optim.Optimizer, step: int) -> None:
    """One parameter gets none in the even steps."""
    generator = torch.Generator().manual_seed(100 + step)
    for index, p in enumerate(optimizer.param_groups[0]["params"]):
        spike = 1e4 if step % 3 == 2 else 1.0
        gradient = torch.randn(p.shape, generator=generator) * spike
        p.grad = gradient.to(p.dtype)
        if index == 2 and step % 2 == 0:
            p.grad = None


def held(optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = []
    for p in optimizer.param_groups[0]["params"]:
        found.append(bytes_of(p))
        for name, value in sorted(optimizer.state.get(p, {}).items()):
            bits = bytes_of(value) if isinstance(value, Tensor) else value
            found.append((name, bits))
    return found


def check(optimizer: Make, kind: type[Any], **more: Any) -> None:
    """Six steps: valid and invalid speculative steps against plain ones."""
    plain, ours = make(optimizer, **more), make(optimizer, **more)
    rollback: Rollback = kind(ours)
    for step in range(6):
        for each in (plain, ours):
            give_gradients(each, step)
        before = held(ours)
        rollback.take()
        if step % 2:
            plain.step()
            rollback.commit()
        else:
            rollback.undo()
            rollback.undo()  # interrupted, and asked for once more
            assert held(ours) == before
            if step == 2:  # clipped; the other even steps are skipped
                for each in (plain, ours):
                    for p in each.param_groups[0]["params"]:
                        if p.grad is not None:
                            p.grad.mul_(0.3)
                    each.step()
        assert held(ours) == held(plain), f"step {step}"


def live_tensors() -> list[Tensor]:
    gc.collect()
    return [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]


def grown(before: list[Tensor]) -> int:
    """Bytes of tensors that have come since; those of other tests may have gone."""
    known = {t.data_ptr() for t in before}
    now = {t.data_ptr(): t.nbytes for t in live_tensors()}
    return sum(n for address, n in now.items() if address not in known)


def stepped_once(width: int) -> torch.optim.Optimizer:
    """With gradients that stay."""
    optimizer = make(OPTIMIZERS["AdamW {'fused': True}"], shapes=((1000, width),) * 4)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def growths(rollback: Rollback, before: list[Tensor]) -> Iterator[int]:
    """Bytes that have come after each of three speculative steps, all of them valid."""
    for _ in range(3):
        rollback.take()
        yield grown(before)
        rollback.commit()


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
    before = live_tensors()
    for growth in growths(deferred, before):
        assert growth == 4 * 1000 * 100 * 4
    assert grown(before) == 4 * 1000 * 100 * 4


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
