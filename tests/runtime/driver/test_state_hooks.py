"""A ``state_dict`` of a model or an optimizer is that of a validated step."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_model import N_LAYERS, batch, build, make_pipeline
from torch import nn

from zbpp.runtime.driver.stages import LocalStages


def layers() -> nn.Sequential:
    return nn.Sequential(*build(range(N_LAYERS)))


def trained(post_validation: bool) -> tuple[Any, nn.Sequential]:
    """The last step of three is invalid, and known to be so only at V."""
    model = layers()
    pipeline = make_pipeline(
        "ZBH1",
        2,
        model=model,
        clip_grad_norm=0.05,
        post_validation=post_validation,
    )
    for step in range(3):
        pipeline.step(*batch(step))
    return pipeline, model


def of_the_model(_: Any, model: nn.Sequential) -> dict[str, Any]:
    return model.state_dict()


def of_a_part(_: Any, model: nn.Sequential) -> dict[str, Any]:
    return model[4].up.state_dict()  # type: ignore[union-attr,operator]


def of_an_optimizer(pipeline: Any, _: nn.Sequential) -> dict[str, Any]:
    state = pipeline.optimizers[0].state_dict()["state"]
    return {str(index): values["exp_avg"] for index, values in state.items()}


def of_a_copy(pipeline: Any, model: nn.Sequential) -> dict[str, Any]:
    pipeline.synchronize()
    return copy.deepcopy(model).state_dict()


def looked_at(_: Any, model: nn.Sequential) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


Look = Callable[[Any, nn.Sequential], dict[str, Any]]


def differences(look: Look) -> list[str]:
    plain = look(*trained(False))
    pipeline, model = trained(True)
    values = look(pipeline, model)
    return [name for name, x in values.items() if not torch.equal(x, plain[name])]


@pytest.mark.parametrize("look", [of_the_model, of_a_part, of_an_optimizer, of_a_copy])
def test_a_state_is_validated(look: Look) -> None:
    assert not differences(look)


def test_a_look_that_does_not_settle_would_be_noticed() -> None:
    assert differences(looked_at)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_has_no_ties_to_the_pipeline(
    duplicate: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[LocalStages] = []
    monkeypatch.setattr(LocalStages, "synchronize", lambda self: calls.append(self))
    model = layers()
    pipeline = make_pipeline("ZBH1", 2, model=model)
    calls.clear()
    duplicate(model).state_dict()
    assert not calls
    model.state_dict()
    assert {*calls} == {pipeline.stages}


def test_a_closed_pipeline_leaves_nothing_behind() -> None:
    model = layers()
    before = [dict(vars(module)) for module in model.modules()]
    for _ in range(2):
        with make_pipeline("ZBH1", 2, model=model) as pipeline:
            pipeline.step(*batch(0))
    for module, held in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == held.keys()
        assert not module._state_dict_pre_hooks
