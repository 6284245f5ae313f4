"""How a sum is rounded depends on strides: a cut, or a copy, must not change them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cut_runs import is_same
from pool import Pool
from torch import Tensor, nn

from zbpp.runtime.backward import layouts
from zbpp.runtime.comm import mailbox
from zbpp.runtime.support.strides import copy_of, strides_of, with_strides


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


@pytest.mark.parametrize(
    "case",
    [("1F1B", 4), ("ZBH1", 4), ("VPP", 2), ("1F1B", 1, "all"), ("ZBH1", 3, "all")],
    ids=str,
)
def test_cuts_in_one_process_change_no_bit(case: Any) -> None:
    assert is_same(build, *case)


def test_a_gradient_in_another_layout_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layouts, "_keep", lambda *_: None)
    assert not is_same(build, "1F1B", 4)


def without_strides(mode: str) -> bool:
    kept, mailbox.with_strides = mailbox.with_strides, lambda tensor, _: tensor
    try:
        return is_same(build, mode, None)
    finally:
        mailbox.with_strides = kept


def in_processes(mode: str) -> bool:
    return is_same(build, mode, None)


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
