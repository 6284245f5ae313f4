"""How a sum is rounded depends on strides: a cut, or a copy, must not change them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zbpp
from zbpp.runtime.backward import layouts
from zbpp.runtime.comm import mailbox
from zbpp.runtime.support.strides import copy_of, strides_of, with_strides

N_MICROBATCHES = 4


class Scale(nn.Module):
    """Its gradient is a sum over all but the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Transposed(nn.Module):
    """Hands on a transposed tensor, and a transposed gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT).mT


class RealPart(nn.Module):
    """Hands on every other number of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).real


class Norm(nn.Module):
    """Sums over samples, and changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


def build() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        Transposed(), Scale(), Transposed(), Norm(), RealPart(), Norm(), Transposed(),
        RealPart(),
    ]  # fmt: skip


def batch() -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    inputs, targets = torch.randn(2, N_MICROBATCHES, 5, 7, 8)
    return list(inputs), list(targets)


def plain() -> dict[str, Tensor]:
    """The gradients of a loop over micro-batches in a model that nothing cuts."""
    model = nn.Sequential(*build())
    for x, target in zip(*batch(), strict=True):
        (mse_loss(model(x), target) / N_MICROBATCHES).backward()
    return gradients_of(model.named_parameters())


def gradients_of(parameters: Any) -> dict[str, Tensor]:
    return {name.removeprefix("layers."): p.grad for name, p in parameters}


def of_pipeline(
    mode: str, n_stages: int | None, recompute: str | None = None
) -> dict[str, Tensor]:
    """The gradients of this process's parameters after two steps of the same batch."""
    layers = build()
    schedule: Any = mode
    if recompute is not None:
        schedule = zbpp.plan_model(
            layers, mode, n_stages=n_stages, n_microbatches=N_MICROBATCHES,
            recompute=recompute, loss_fn=mse_loss,
        )  # fmt: skip
    with zbpp.Pipeline(
        layers, schedule, optimizer=None, loss_fn=mse_loss, device="cpu",
        n_stages=n_stages, n_microbatches=N_MICROBATCHES,
    ) as pipeline:  # fmt: skip
        for _ in range(2):  # the second one knows all shapes
            for _, p in pipeline.named_parameters():
                p.grad = None
            pipeline.step(*batch())
        return gradients_of(pipeline.named_parameters())


def is_same(found: dict[str, Tensor]) -> bool:
    expected = plain()
    assert found
    return all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    "case",
    [("1F1B", 4), ("ZBH1", 4), ("VPP", 2), ("1F1B", 1, "all"), ("ZBH1", 3, "all")],
    ids=str,
)
def test_cuts_in_one_process_change_no_bit(case: Any) -> None:
    assert is_same(of_pipeline(*case))


def test_a_gradient_in_another_layout_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layouts, "_keep", lambda *_: None)
    assert not is_same(of_pipeline("1F1B", 4))


def without_strides(mode: str) -> bool:
    kept, mailbox.with_strides = mailbox.with_strides, lambda tensor, _: tensor
    try:
        return is_same(of_pipeline(mode, None))
    finally:
        mailbox.with_strides = kept


def in_processes(mode: str) -> bool:
    return is_same(of_pipeline(mode, None))


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["1F1B", "ZBV"])
def test_cuts_between_processes_change_no_bit(pool: Pool, mode: str) -> None:
    assert pool.run(in_processes, 2, mode) == [True, True]
    assert not all(pool.run(without_strides, 2, mode))


def by_hand(x: Tensor) -> list[Any]:
    return [x.clone(), x.mT, x[:1].expand(6, 4, 3), x[..., ::2], x[:, :, 0], x[2:]]


@pytest.mark.parametrize("copy", [copy_of, None], ids=["copy_of", "with_strides"])
def test_a_copy_has_the_strides_it_can(copy: Callable[[Tensor], Tensor] | None) -> None:
    for x in by_hand(torch.randn(6, 4, 3)):
        strides = strides_of(x)
        if copy is None and strides is None:
            continue
        found = copy(x) if copy else with_strides(x.contiguous(), strides or ())
        assert torch.equal(found, x) and found.data_ptr() != x.data_ptr()
        assert found.stride() == (strides or x.contiguous().stride())
    told = [strides_of(x) for x in by_hand(torch.randn(6, 4, 3))]
    assert told == [None, (12, 1, 3), (0, 3, 1), (12, 3, 2), None, None]


def test_what_shares_memory_otherwise_is_made_contiguous() -> None:
    windows = torch.arange(6.0).as_strided((4, 3), (1, 1))
    assert strides_of(windows) is None
    assert torch.equal(copy_of(windows), windows)
