"""``--model module:function``: what the function may return."""

import importlib
import sys
from pathlib import Path

import pytest

from zbpp.cli import main
from zbpp.core import RequestError
from zbpp.training.user_model import load_model

pytestmark = pytest.mark.needs("torch")

SOURCE = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

x = torch.ones(2, 4)

def block(i=0):
    return nn.Linear(4, 4)

def triple():
    return nn.Sequential(block(), block()), (x, x), mse_loss

def pair():
    return [block(), block()], (x, None)

def builder():
    return ((lambda own: [block(i) for i in own]), 3), (x, x), mse_loss

def no_count():
    return (lambda own: [block(i) for i in own]), (x, x), mse_loss

def no_targets():
    return [block()], (x, None), mse_loss

def inputs_only():
    return [block()], x, mse_loss

def one_module():
    return block(), (x, x), mse_loss

def model_only():
    return [block()]

something = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_model.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "their_model", raising=False)
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("name", "n_layers", "has_loss"),
    [("triple", 2, True), ("pair", 2, False), ("builder", 3, True)],
)
def test_a_model_is_loaded_with_its_batch_and_loss(
    name: str, n_layers: int, has_loss: bool
) -> None:
    loaded = load_model(f"their_model:{name}")
    assert loaded.n_layers == len(loaded.layers()) == n_layers
    assert tuple(loaded.inputs.shape) == (2, 4)
    assert (loaded.loss_fn is not None) == (loaded.targets is not None) == has_loss


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("their_model", "write it as module:function"),
        ("their_model:absent", "has no attribute 'absent'"),
        ("their_model:something", "it must be a function that returns"),
        ("their_model:model_only", "it must be a function that returns"),
        ("their_model:inputs_only", "the batch is a Tensor; give one micro-batch"),
        ("their_model:no_targets", "loss_fn is called with outputs and targets"),
        ("their_model:no_count", "a model given as a builder needs n_layers"),
        ("their_model:one_module", "a Linear cannot be cut into layers"),
    ],
)
def test_what_is_no_model_is_refused(name: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_model(name)


@pytest.mark.parametrize("name", ["triple", "pair", "builder", "one_module"])
def test_doctor_takes_a_model_with_its_batch_and_loss(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--model", f"their_model:{name}"]) == 0
    out = capsys.readouterr().out
    assert "weight" in out and "│ W" in out
