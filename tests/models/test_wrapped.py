"""Models in a wrapper of peft: the layers are the model's, the names the wrapper's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zbpp
from zbpp import Pipeline, RequestError
from zbpp.models import layered_of


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Tuner(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def wrapped(model: nn.Module, *, prompt: bool = False) -> nn.Module:
    """As peft wraps a model, by the names of its class and its modules."""

    def init(self: Any) -> None:
        nn.Module.__init__(self)
        self.base_model = Tuner(model)
        config = SimpleNamespace(is_prompt_learning=prompt, peft_type="PROMPT_TUNING")
        self.peft_config = {"default": config}

    methods = {
        "__init__": init,
        "__module__": "peft.peft_model",
        "get_base_model": lambda self: self.base_model.model,
    }
    made: nn.Module = type("PeftModel", (nn.Module,), methods)()
    return made


def test_layers_below_a_wrapper_of_peft_keep_the_wrappers_names() -> None:
    model = wrapped(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))))
    layered = layered_of(model)
    assert layered.own_name(1, "weight") == "base_model.model.1.weight"
    pipeline = Pipeline(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        n_stages=2,
        n_microbatches=2,
    )
    assert set(pipeline.state_dict()["model"]) == set(model.state_dict())
    assert pipeline.step(torch.ones(4, 4), torch.zeros(4, 4)).loss > 0


@pytest.mark.parametrize("path", ["base_model.model.blocks", "blocks"])
def test_a_wrapper_of_peft_is_cut_at_its_own_path_or_at_the_models(path: str) -> None:
    model = wrapped(Base())
    layered = zbpp.cut(model, path)
    assert layered.own_name(1, "block.weight") == "base_model.model.blocks.0.weight"


def test_a_prompt_before_the_model_is_refused() -> None:
    with pytest.raises(RequestError, match="PROMPT_TUNING puts a prompt before"):
        layered_of(wrapped(Base(), prompt=True))
