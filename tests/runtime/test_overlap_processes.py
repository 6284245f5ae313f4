"""Experts of two processes, whose tokens go by real all-to-alls, in turns and in a row.

A plan of one stage has pairs already, so two replicas of it are the smallest group.
"""

import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe import moe_costs
from pool import Pool
from small_model import assert_same
from talking import WIDTH, Outcome, batch, make, train
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_to_all_single_autograd,
)

import zbpp

issued: list[str] = []
"""Collectives of the layers, in the order of their calls."""


class _AllToAll(torch.autograd.Function):
    """Rows of several lengths to all processes; the gradients go back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sends: list[int], receives: list[int], how: Any
    ) -> Tensor:
        ctx.lengths, ctx.how = (sends, receives), how
        return _exchanged(x, sends, receives, "F", how)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        sends, receives = ctx.lengths
        return _exchanged(dy, receives, sends, "B", ctx.how), None, None, None


def _exchanged(
    x: Tensor, sends: list[int], receives: list[int], half: str, how: Any
) -> Tensor:
    group, name = how
    issued.append(f"{half} {name}")
    y = x.new_empty(sum(receives), x.shape[1])
    dist.all_to_all_single(y, x.contiguous(), receives, sends, group=group)
    return y


class Mixture(nn.Module):
    """Top-1 routing to one expert a process, and a skip.

    Args:
        index: of the layer.
        group: of the experts.
        functional: combine by torch's functional collective, which does not wait.
    """

    def __init__(
        self, index: int, group: dist.ProcessGroup, *, functional: bool
    ) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.index, self.group, self.functional = index, group, functional
        self.router = nn.Linear(WIDTH, group.size(), bias=False)
        self.expert, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def dispatch(self, x: Tensor, sends: Tensor) -> tuple[Tensor, list[int], list[int]]:
        receives = torch.empty_like(sends)
        dist.all_to_all_single(receives, sends, group=self.group)
        lengths = sends.tolist(), receives.tolist()
        how = self.group, f"dispatch{self.index}"
        return _AllToAll.apply(x, *lengths, how), *lengths

    def combine(self, x: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        if self.functional:
            sent: Tensor = all_to_all_single_autograd(x, sends, receives, self.group)
            assert isinstance(sent, AsyncCollectiveTensor)
            return sent
        how = self.group, f"combine{self.index}"
        result: Tensor = _AllToAll.apply(x, receives, sends, how)
        return result

    def forward(self, x: Tensor) -> Tensor:
        weights, expert = self.router(x).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        sends = expert.bincount(minlength=self.group.size())
        tokens, *lengths = zbpp.overlap_point(self.dispatch, x[order], sends)
        tokens = self.dropout(torch.tanh(self.expert(tokens)))
        tokens = zbpp.overlap_point(self.combine, tokens, *lengths)
        return x + weights[:, None] * tokens[order.argsort()]


def trained(mode: str, *, functional: bool = False, **more: Any) -> Outcome:
    group = dist.new_group([0, 1])
    layers = (Mixture(index, group, functional=functional) for index in range(4))
    model = nn.Sequential(*layers)
    mesh = zbpp.mesh(stages=1, data_parallel=2)
    pipeline = make(model, mode, mesh=mesh, seed=3, **more)
    issued.clear()
    return train(pipeline, steps=2)


def in_three_ways(mode: str, **how: Any) -> list[list[str]]:
    """Beside one another, in a row, and without any plan: the order of collectives."""
    numbers, state = trained(mode, **how)
    orders = [issued.copy()]
    for plain, more in ((mode, how | {"overlap": False}), ("FThenB", {})):
        other = trained(plain, **more)
        orders.append(issued.copy())
        assert numbers == other[0]
        assert_same(state, other[1])
    return orders


def in_segments() -> list[list[str]]:
    """A plan for two lanes, whose W's fill gaps, beside sums over replicas."""
    return in_three_ways("ZB", costs=moe_costs(0.4, 4))


def by_functional_collectives() -> None:
    numbers, state = trained("DualPipeV", functional=True)
    other = trained("DualPipeV", functional=True, overlap=False)
    assert numbers == other[0] == trained("DualPipeV")[0]
    assert_same(state, other[1])


def test_real_all_to_alls_have_the_same_bits_and_one_order(pool: Pool) -> None:
    first, second = pool.run(in_three_ways, 2, "DualPipeV")
    assert first == second  # the ranks issue alike
    in_turns, in_a_row, _ = first
    assert sorted(in_turns) == sorted(in_a_row) and in_turns != in_a_row
    layers = ["B combine3", "F dispatch0", "B dispatch3", "F combine0"]
    layers += ["B combine2", "F dispatch1", "B dispatch2", "F combine1"]
    at = in_turns.index("F dispatch0", in_turns.index("B combine0")) - 1
    assert in_turns[at : at + 8] == layers


def test_segments_have_the_same_bits_and_one_order(pool: Pool) -> None:
    first, second = pool.run(in_segments, 2)
    assert first == second  # the ranks issue alike
    beside, in_a_row, _ = first
    assert sorted(beside) == sorted(in_a_row) and beside != in_a_row


def test_functional_collectives_that_do_not_wait_have_the_same_bits(
    pool: Pool,
) -> None:
    pool.run(by_functional_collectives, 2)


def one_rank_fails(folder: str) -> None:
    """Rank 1 raises in the F of a pair, whose all-to-all rank 0 waits for."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=5))
    mixtures = [Mixture(index, group, functional=False) for index in range(2)]
    expert, is_armed = mixtures[0].expert.forward, False

    def failing(x: Tensor) -> Tensor:
        if is_armed and dist.get_rank() == 1:
            raise ArithmeticError("an expert fails")
        return expert(x)

    mixtures[0].expert.forward = failing  # type: ignore[method-assign]
    mesh = zbpp.mesh(stages=1, data_parallel=2)
    pipeline = make(nn.Sequential(*mixtures), mesh=mesh, timeout_s=5.0)
    pipeline.step(*batch(0))
    is_armed = True
    try:
        pipeline.step(*batch(1))
    except Exception as error:
        threads = [x.name for x in threading.enumerate() if x.name.startswith("zbpp ")]
        notes = getattr(error, "__notes__", [])
        text = f"{type(error).__name__}: {error} {notes} {threads}"
        (Path(folder) / str(dist.get_rank())).write_text(text)


@pytest.mark.slow  # waits for a time-out
def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    workers = Pool()
    try:
        with suppress(AssertionError):  # the ranks' own group has broken as well
            workers.run(one_rank_fails, 2, str(tmp_path))
    finally:
        workers.close()
    first, second = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert first.startswith("PeerError") and "rank 1" in first and "[]" in first
    assert second.startswith("ArithmeticError: an expert fails")
    assert "in 0F" in second and second.endswith("[]")
