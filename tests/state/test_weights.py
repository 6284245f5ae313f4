"""Layers that other processes train are no plain model any more: their use is refused.

Their first weights would be read as if they were the trained ones.
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
from small import batch, make
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel

import zbpp
import zbpp.checkpoint

WORDS = "pipeline.save(folder)", "zbpp.checkpoint.load(folder, new_model)"
adamw = partial(torch.optim.AdamW, lr=1e-2)


class Model(nn.Module):
    """Blocks between an embedding and a head, which may share a weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4)
        )
        if tied:
            self.head.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model_of(name: str) -> tuple[Any, nn.Module]:
    """What `zbpp.Pipeline` takes, and the whole model."""
    torch.manual_seed(0)
    if name in ("cut", "tied"):
        model = Model(tied=name == "tied")
        return zbpp.cut(model, "blocks", example=torch.zeros(4, 8)), model
    layers = [nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8)) for _ in range(4))]
    model = nn.Sequential(*layers)
    return (model if name == "sequential" else layers), model


NAMES = ("sequential", "list", "cut", "tied")


def prefix_of(name: str) -> str:
    """Layers of a list have no names."""
    return "layers." if name == "list" else ""


def words_of(use: Callable[[], Any]) -> str:
    try:
        use()
    except zbpp.RequestError as error:
        return str(error)
    return "nothing"


USES: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda model: model.state_dict(),
    "forward": lambda model: model(batch(16)[0]),
    "average": AveragedModel,
    "copy": copy.deepcopy,
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
}


def use_after_training(name: str, folder: str) -> tuple[dict[str, str], list[float]]:
    """The error of each use, and losses of the pipeline and of the saved model."""
    layers, model = model_of(name)
    watched = [weakref.ref(p) for p in model.parameters()]
    pipeline = make(layers, "1F1B", optimizer=adamw)
    gc.collect()
    n_alive = sum(p() is not None for p in watched)
    for _ in range(3):
        pipeline.step(*batch(16))
    words = {use: words_of(partial(f, model)) for use, f in USES.items()}
    words["another split"] = words_of(lambda: make(layers, "ZBV"))
    here = {id(p) for _, p in pipeline.named_parameters()}
    assert n_alive == len(here) < len(watched), "weights of other stages use memory"
    for _, layer in pipeline.named_layers():  # those of this stage can be read
        assert all(not x.is_meta for x in layer.state_dict().values())
    losses = [pipeline.evaluate(*batch(16))]
    pipeline.save(folder, wait=True)
    whole, prefix = model_of(name)[1], prefix_of(name)
    zbpp.checkpoint.load(folder, whole, own_name=lambda n: prefix + n)
    losses.append(float(mse_loss(whole.eval()(batch(16)[0]), batch(16)[1])))
    pipeline.close()
    return words, losses


@pytest.mark.dist
@pytest.mark.parametrize("name", NAMES)
def test_stale_weights_are_not_used(pool: Pool, tmp_path: Any, name: str) -> None:
    for words, (piped, plain) in pool.run(use_after_training, 2, name, str(tmp_path)):
        assert "another zbpp.Pipeline has released" in words.pop("another split")
        for use, text in words.items():
            assert all(word in text for word in WORDS), (use, text)
        assert plain == pytest.approx(piped, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_one_process_trains_the_model_as_a_whole(name: str) -> None:
    """The control: nothing is released, and the model is the trained one."""
    layers, model = model_of(name)
    pipeline = make(layers, "1F1B", optimizer=adamw)
    pipeline.step(*batch(16))
    pipeline.synchronize()
    for use in USES.values():
        use(model)
    loss = mse_loss(model.eval()(batch(16)[0]), batch(16)[1])
    assert loss.item() == pytest.approx(pipeline.evaluate(*batch(16)), rel=1e-5)


def plan_and_train() -> float:
    model, _ = model_of("sequential")
    how: dict[str, Any] = {"loss_fn": mse_loss, "optimizer": adamw, "device": "cpu"}
    plan = zbpp.plan_model(model, "ZBV", n_microbatches=4, example=batch(16), **how)
    with make(model, plan, optimizer=adamw) as pipeline:
        return pipeline.step(*batch(16)).loss


@pytest.mark.dist
def test_measuring_a_model_releases_nothing(pool: Pool) -> None:
    loss = make(model_of("sequential")[0], optimizer=adamw).step(*batch(16)).loss
    assert pool.run(plan_and_train, 2) == [loss, loss]
