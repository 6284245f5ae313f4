"""Optimizers of torch, and the bits that a rollback of their steps must leave."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from outcomes import bytes_of
from torch import Tensor, nn

from zbpp.runtime.optim.rollback import Rollback

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


def live_bytes() -> int:
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def stepped_once(width: int) -> torch.optim.Optimizer:
    """With gradients that stay."""
    optimizer = make(OPTIMIZERS["AdamW {'fused': True}"], shapes=((1000, width),) * 4)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def growths(rollback: Rollback, before: int) -> Iterator[int]:
    """Bytes that have come after each of three speculative steps, all of them valid."""
    for _ in range(3):
        rollback.take()
        yield live_bytes() - before
        rollback.commit()
