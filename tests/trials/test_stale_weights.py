"""Layers that other processes train are no plain model any more: their use is refused.

Their initial weights would be read as if they were the trained ones.
"""

import copy
import gc
import io
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel

import zbpp
import zbpp.checkpoint

WORDS = "pipeline.save(folder)", "zbpp.checkpoint.load(folder, new_model)"


class Model(nn.Module):
    """Blocks between an embedding and a head of its weight, if they are tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)
        )
        self.head = nn.Linear(8, 8)
        if tied:
            self.head.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def blocks() -> list[nn.Module]:
    return [nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8)) for _ in range(4))]


Make = Callable[[], tuple[Any, nn.Module]]


def sequential() -> tuple[Any, nn.Module]:
    model = nn.Sequential(*blocks())
    return model, model


def listed() -> tuple[Any, nn.Module]:
    layers = blocks()
    return layers, nn.Sequential(*layers)


def cut(tied: bool) -> tuple[Any, nn.Module]:
    model = Model(tied)
    return zbpp.cut(model, "blocks", before=["inner"], after=["head"]), model


MODELS: dict[str, Make] = {
    "sequential": sequential,
    "list": listed,
    "cut": partial(cut, False),
    "tied": partial(cut, True),
}


def made(name: str) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    return MODELS[name]()


def pipeline_of(model: Any, mode: str = "1F1B", **more: Any) -> zbpp.Pipeline:
    return zbpp.Pipeline(
        model, mode, loss_fn=mse_loss, n_microbatches=4, device="cpu",
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), **more,
    )  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1))
    return x, y


def said(use: Callable[[], Any]) -> str:
    try:
        use()
    except zbpp.RequestError as error:
        return str(error)
    return "nothing"


USES: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "forward": lambda model: model(batch()[0]),
    "average": AveragedModel,
    "copy": copy.deepcopy,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
}


def use_after_training(name: str, folder: str) -> tuple[dict[str, str], int, list[Any]]:
    """What each use says; parameters that still have memory; losses before, after."""
    given, model = made(name)
    watched = [weakref.ref(p) for p in model.parameters()]
    pipeline = pipeline_of(given)
    gc.collect()
    n_here = sum(p() is not None for p in watched)
    for _ in range(3):
        pipeline.step(*batch())
    words = {use: said(lambda f=f: f(model)) for use, f in USES.items()}
    words["another split"] = said(lambda: pipeline_of(given, "ZBV"))
    assert all(p.device.type == "cpu" for _, p in pipeline.named_parameters())
    here = list(pipeline.named_parameters())
    assert n_here == len({id(p) for _, p in here}) < len(watched)
    for _, layer in pipeline.named_layers():  # what is trained here can be read
        assert all(not x.is_meta for x in layer.state_dict().values())
    losses = [pipeline.evaluate(*batch())]
    pipeline.save(folder, wait=True)
    whole = made(name)[1]
    prefix = "layers." if isinstance(given, list) else ""
    zbpp.checkpoint.load(folder, whole, own_name=lambda n: prefix + n)
    losses.append(float(mse_loss(whole.eval()(batch()[0]), batch()[1])))
    pipeline.close()
    return words, n_here, losses


@pytest.mark.dist
@pytest.mark.parametrize("name", MODELS)
def test_stale_weights_are_not_used(pool: Pool, tmp_path: Any, name: str) -> None:
    for words, _, (piped, plain) in pool.run(
        use_after_training, 2, name, str(tmp_path)
    ):
        for use, text in words.items():
            if use == "another split":
                assert "another zbpp.Pipeline has released" in text
            else:
                assert all(word in text for word in WORDS), (use, text)
        assert plain == pytest.approx(piped, rel=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_one_process_trains_the_model_as_a_whole(name: str) -> None:
    """The control: nothing is released, and the model is the trained one."""
    given, model = made(name)
    pipeline = pipeline_of(given, n_stages=2)
    pipeline.step(*batch())
    pipeline.synchronize()
    for use in USES.values():
        use(model)
    loss = mse_loss(model.eval()(batch()[0]), batch()[1])
    assert loss.item() == pytest.approx(pipeline.evaluate(*batch()), rel=1e-5)


def plan_and_train() -> float:
    given, _ = made("sequential")
    plan = zbpp.plan_model(
        given, "ZBV", n_microbatches=4, example=batch(), loss_fn=mse_loss, device="cpu",
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )  # fmt: skip
    with pipeline_of(given, plan) as pipeline:
        return pipeline.step(*batch()).loss


@pytest.mark.dist
def test_measuring_a_model_releases_nothing(pool: Pool) -> None:
    one = pipeline_of(made("sequential")[0], n_stages=2).step(*batch()).loss
    assert pool.run(plan_and_train, 2) == [one, one]


@pytest.mark.parametrize(
    ("name", "prefix"), [("sequential", ""), ("cut", ""), ("list", "layers.")]
)
def test_parameters_have_the_names_that_the_model_gives_them(
    name: str, prefix: str
) -> None:
    given, model = made(name)
    seen: list[str] = []

    def optimizer(named_parameters: list[tuple[str, nn.Parameter]]) -> Any:
        seen.extend(name for name, _ in named_parameters)
        return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)

    pipeline = zbpp.Pipeline(
        given,
        "ZBV",
        optimizer=optimizer,
        loss_fn=mse_loss,
        n_stages=2,
        n_microbatches=4,
    )
    parameters, buffers = pipeline.named_parameters(), pipeline.named_buffers()
    expected = {prefix + name: p for name, p in model.named_parameters()}
    assert {name: id(p) for name, p in parameters} == {
        n: id(p) for n, p in expected.items()
    }
    assert set(seen) == expected.keys()
    expected |= {prefix + name: x for name, x in model.named_buffers()}
    assert {name for name, _ in buffers} | set(seen) == expected.keys()
    assert pipeline.state_dict()["model"].keys() == expected.keys()
