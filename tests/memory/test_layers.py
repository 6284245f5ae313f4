"""Memory of layers, against sums done by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from zbpp.core import PassKind, Placement, RequestError
from zbpp.memory import layer_memory
from zbpp.memory.layers import model_memory

N, D = 32, 16
SIZE = N * D * 4  # bytes of an activation
WEIGHT = D * D * 4


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def block() -> nn.Module:
    """Linear keeps its input, Tanh its output, which the next layer reads."""
    return nn.Sequential(nn.Linear(D, D, bias=False), nn.Tanh())


def batch() -> tuple[Tensor, Tensor]:
    return torch.empty(N, D), torch.empty(N, D)


def test_blocks_take_what_a_pencil_says() -> None:
    costs = layer_memory([block() for _ in range(6)], batch(), mse_loss, optimizer=sgd)
    assert costs.n_layers == 6
    # The batch is the caller's; the other inputs are the layers' own.
    assert costs.of("m_b")[:-1] == (0, SIZE, SIZE, SIZE, SIZE)
    assert costs.of("m_w")[1:-1] == (2 * SIZE,) * 4  # x and dy
    # parameters, gradients, and the copy for a rollback; SGD has no state
    assert costs.of("m_fixed") == (3 * WEIGHT,) * 6
    assert costs.of("message") == (SIZE,) * 5
    assert costs.of("peak_f")[1:-1] == (3 * SIZE,) * 4
    assert costs.of("peak_w")[1:-1] == (WEIGHT,) * 4
    assert costs.of("m_r")[1:-1] == (SIZE,) * 4


def test_w_behind_b_in_one_pass_stands_on_what_b_has_kept() -> None:
    """Two values more than F has left, what B has read, and what it gives."""
    layers = [block() for _ in range(5)]
    memory = model_memory(layers, batch(), mse_loss, exact_sums=False)
    blocks = memory.chunk(range(1, 4))
    assert blocks.peak(PassKind.B, first=True) == 4 * SIZE
    assert blocks.peak(PassKind.W, first=True) == WEIGHT
    assert blocks.peak(PassKind.BW, first=True) == 4 * SIZE + WEIGHT


def test_no_post_validation_keeps_no_copy() -> None:
    costs = layer_memory(
        [block()] * 1, batch(), mse_loss, optimizer=sgd, post_validation=False
    )
    assert costs.of("m_fixed") == (2 * WEIGHT,)


def test_adamw_is_the_default_with_two_moments() -> None:
    costs = layer_memory([block() for _ in range(2)], batch(), mse_loss)
    assert costs.of("m_fixed") == (5 * WEIGHT + 4,) * 2  # its step is a number


def test_any_of_several_optimizers_may_need_the_most() -> None:
    def large_first(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(parameters[:1]), sgd(parameters[1:])]

    makes = (large_first, lambda parameters: large_first(parameters)[::-1])
    first, last = (
        layer_memory([nn.Linear(D, D)], batch(), mse_loss, optimizer=make).of("peak_o")
        for make in makes
    )
    assert first == last > (WEIGHT,)


def test_another_size_of_micro_batches_is_traced_anew() -> None:
    layers = [block() for _ in range(4)]
    costs = layer_memory(layers, batch(), mse_loss, microbatch_size=3 * N)
    assert costs.of("m_b")[1:-1] == (3 * SIZE,) * 2


def test_a_builder_allocates_nothing() -> None:
    wide = 2**22

    def build(own: range) -> list[nn.Module]:
        return [nn.Linear(wide, wide, bias=False) for _ in own]  # 64 TiB each

    x = torch.empty(1, wide)
    costs = layer_memory(build, (x, x), mse_loss, n_layers=100)
    assert costs.of("m_fixed")[50] > 5 * 2**46
    placement = Placement((0, 1))
    assert costs.on(placement, [50, 50]).on(placement).fixed[0] > 250 * 2**46


def test_the_model_given_stays_as_it_is() -> None:
    layers = nn.Sequential(block(), block())
    before = {name: p.clone() for name, p in layers.named_parameters()}
    layer_memory(layers, batch(), mse_loss)
    for name, p in layers.named_parameters():
        assert type(p) is nn.Parameter and p.grad is None
        assert torch.equal(p, before[name])


class Choosy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].sum() + x


def test_a_model_that_decides_by_its_data_is_refused() -> None:
    with pytest.raises(RequestError, match=r"layer 1 \(a Choosy\).*aten.nonzero"):
        layer_memory([block(), Choosy()], batch(), mse_loss)
