"""A torch that is not split right is found before anything is trained."""

import pytest
import torch
from torch import nn

import zbpp
from zbpp.core import RequestError
from zbpp.runtime import SplitModule, WeightQueue
from zbpp.runtime.backward import self_check


@pytest.fixture(autouse=True)
def afresh():
    self_check.check_split.cache_clear()
    yield
    self_check.check_split.cache_clear()


def build() -> zbpp.Pipeline:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    loss = nn.MSELoss()
    return zbpp.Pipeline(
        layers, "ZBH1", optimizer=None, loss_fn=loss, n_stages=2, n_microbatches=2
    )


def test_this_torch_is_split_right_whatever_the_defaults_are() -> None:
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.no_grad():
            self_check.check_split()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("use", [build, lambda: SplitModule(nn.Linear(2, 2))])
def test_a_lost_weight_gradient_is_found_at_first_use(monkeypatch, use) -> None:
    monkeypatch.setattr(WeightQueue, "run", lambda *_, **__: None)
    with pytest.raises(RequestError, match="gradient of a weight is not that of a"):
        use()


def test_it_is_compared_once(monkeypatch) -> None:
    build()
    monkeypatch.setattr(self_check, "_gradients", None)
    build()
