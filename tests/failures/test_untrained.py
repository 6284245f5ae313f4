"""Parameters that no step would train are named, once."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.nn import functional as f
from torch.utils.checkpoint import checkpoint

import zbpp

WIDTH = 4
X = torch.arange(32.0).view(8, WIDTH) / 32
sgd = partial(torch.optim.SGD, lr=0.1)


def make(model: Any, n_stages: int | None = 2, **more: Any) -> zbpp.Pipeline:
    settings = {"optimizer": sgd, "loss_fn": f.mse_loss, "n_microbatches": 2} | more
    return zbpp.Pipeline(model, "ZBH1", n_stages=n_stages, device="cpu", **settings)


# ---- Chosen by the optimizer, or frozen.


class Scale(nn.Module):
    """No matrix, so a stage of these alone has nothing for Muon."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gain)


def warnings_of(pattern: str, frozen: bool, n_stages: int | None) -> list[str]:
    """Train what has a pattern in its name; all that is warned of."""

    def choose(named_parameters: list[tuple[str, nn.Parameter]]) -> list[Any]:
        chosen = [p for name, p in named_parameters if pattern in name]
        return [sgd(chosen)] if chosen else []

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Scale(), Scale())
    model.requires_grad_(not frozen)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with make(model, n_stages, optimizer=choose) as pipeline:
            for _ in range(3):
                pipeline.step(X, X)
    texts = [str(one.message) for one in warned]
    return [text for text in texts if "gains little" not in text]


HALF = "4 parameter(s) have gradients, but no optimizer steps them (0.bias, 1.bias, 2."
FROZEN = "all parameters of the model are frozen"


@pytest.mark.dist
@pytest.mark.parametrize(
    ("pattern", "frozen", "words"),
    [("", False, ""), ("weight", False, HALF), ("", True, FROZEN), ("x", True, FROZEN)],
)
def test_one_rank_warns_once(
    pool: Pool, pattern: str, frozen: bool, words: str
) -> None:
    one = warnings_of(pattern, frozen, 2)
    first, last = pool.run(warnings_of, 2, pattern, frozen, None)
    assert (first, last) == (one, [])
    assert len(one) == bool(words) and all(words in text for text in one)


# ---- Put into a layer after the pipeline was built.


class Grows(nn.Module):
    """A Linear, and a second one if it is given one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.more: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.more(self.linear(x))


def replace(layer: Grows, _: zbpp.Pipeline) -> None:
    layer.linear.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))


def assign(layer: Grows, _: zbpp.Pipeline) -> None:
    state = {name: p.detach().clone() for name, p in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def add(layer: Grows, _: zbpp.Pipeline) -> None:
    layer.more = nn.Linear(WIDTH, WIDTH)


def replace_frozen(layer: Grows, _: zbpp.Pipeline) -> None:
    weight = layer.linear.weight.detach().clone()
    layer.linear.weight = nn.Parameter(weight, requires_grad=False)


def write(layer: Grows, _: zbpp.Pipeline) -> None:
    layer.linear.weight.data.fill_(1.0)


def add_to_optimizer(layer: Grows, pipeline: zbpp.Pipeline) -> None:
    add(layer, pipeline)
    pipeline.optimizers[0].add_param_group({"params": layer.more.parameters()})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (replace, r"layers\.1\.linear\.weight"),
        (assign, r"layers\.1\.linear\.weight, layers\.1\.linear\.bias"),
        (add, r"layers\.1\.more\.weight, layers\.1\.more\.bias"),
        (replace_frozen, ""),
        (write, ""),
        (add_to_optimizer, ""),
    ],
)
def test_what_nobody_would_train_is_refused(
    change: Callable[[Grows, zbpp.Pipeline], None], names: str
) -> None:
    layers = [Grows() for _ in range(4)]
    with make(layers, clip_grad_norm=1.0) as pipeline:
        pipeline.step(X, X)
        pipeline.synchronize()
        change(layers[1], pipeline)
        if names:
            with pytest.raises(zbpp.RequestError, match=f"{names} was put into its"):
                pipeline.step(X, X)
            return
        before = [p.detach().clone() for p in layers[1].parameters()]
        for _ in range(2):
            pipeline.step(X, X)
        pipeline.synchronize()
        for p, old in zip(layers[1].parameters(), before, strict=True):
            assert torch.equal(p, old) == (not p.requires_grad)


# ---- Computed again by torch, which may lose their gradients.


class Checkpointed(nn.Module):
    """Computes the layers of a list again in the backward."""

    def __init__(self, layers: list[nn.Module], *, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(layers), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_reentrant_checkpoints_are_refused_where_a_model_is_cut() -> None:
    def losses(how: str, *, reentrant: bool) -> list[float]:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        model: Any = Checkpointed(layers, reentrant=reentrant)
        if how == "cut":
            model = zbpp.cut(model, "blocks")
        else:
            model = [Checkpointed([x], reentrant=reentrant) for x in layers]
        with make(model) as pipeline:
            return [pipeline.step(X, X).loss for _ in range(2)]

    expected = losses("cut", reentrant=False)
    assert losses("list", reentrant=False) == expected
    with pytest.raises(zbpp.RequestError, match="needs use_reentrant=False"):
        losses("cut", reentrant=True)
