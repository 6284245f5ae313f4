"""Copies and pickles of models and optimizers are validated, and stand alone."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from histories import ALWAYS
from moments import uncertain_sums
from small_model import N_LAYERS, batch, build, make_pipeline
from torch import nn


def through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


def through_a_file(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    assert b"zbpp" not in file.getvalue()  # it is read where zbpp is not installed
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model).module


def in_a_container(model: nn.Module) -> nn.Module:
    return copy.deepcopy(nn.ModuleDict({"model": model}))["model"]


WAYS = (copy.deepcopy, through_pickle, through_a_file, averaged, in_a_container)


class Own(nn.Linear):
    """Has a way of its own to be copied and to be pickled."""

    def __deepcopy__(self, memo: Any) -> "Own":
        result = Own(self.in_features, self.out_features)
        memo[id(self)] = result
        result.__dict__ = copy.deepcopy(self.__dict__, memo)
        return result

    def __reduce__(self) -> Any:
        return _restored, (self.in_features, self.out_features, self.weight, self.bias)


def _restored(n: int, m: int, weight: Any, bias: Any) -> Own:
    layer = Own(n, m)
    layer.weight, layer.bias = weight, bias
    return layer


def layers() -> nn.Sequential:
    built = build(range(N_LAYERS))
    torch.manual_seed(9)
    built[4].up = Own(16, 32)
    return nn.Sequential(*built)


def trained(post_validation: bool) -> tuple[Any, nn.Sequential]:
    """The last step of three is invalid, and known to be so only at V."""
    model = layers()
    pipeline = make_pipeline(
        "ZBH1", 2, model=model, patience=ALWAYS, clip_grad_norm=0.05,
        post_validation=post_validation,
    )  # fmt: skip
    for step in range(3):
        pipeline.step(*batch(step))
    return pipeline, model


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_validated(way: Any) -> None:
    _, plain = trained(False)
    with uncertain_sums(0, share=0):
        _, model = trained(True)
        copied = way(model)
    for (name, value), other in zip(
        copied.named_parameters(), plain.parameters(), strict=True
    ):
        assert torch.equal(value, other), name


def test_a_part_of_a_layer_is_validated() -> None:
    _, plain = trained(False)
    for way in (copy.deepcopy, through_pickle, nn.Module.state_dict):
        for index, part in ((1, "up"), (4, "up")):
            with uncertain_sums(0, share=0):
                _, model = trained(True)
                copied = way(getattr(model[index], part))
            weight = copied["weight"] if isinstance(copied, dict) else copied.weight
            assert torch.equal(weight, getattr(plain[index], part).weight)


@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle, through_a_file])
def test_a_copy_has_no_ties_to_the_pipeline(way: Any) -> None:
    pipeline, model = trained(True)
    copied = way(model)
    fresh = layers()
    for module, other in zip(copied.modules(), fresh.modules(), strict=True):
        if not isinstance(module, Own):
            assert vars(module).keys() == vars(other).keys()
            assert not module._state_dict_pre_hooks
            assert not module._load_state_dict_pre_hooks
    calls: list[int] = []
    pipeline._lifecycle.hooks._settle._action = lambda: calls.append(1)
    copied.state_dict()
    again = copy.deepcopy(copied)
    again[4].up.weight.data.zero_()
    assert copied[4].up.weight.abs().sum() > 0 and not calls
    model.state_dict()
    assert calls


@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle, through_a_file])
def test_optimizers_too(way: Any) -> None:
    plain, _ = trained(False)
    with uncertain_sums(0, share=0):
        pipeline, _ = trained(True)
        copied = way(pipeline.optimizers[0])
    assert "__getstate__" not in vars(copied)
    found = copied.state_dict()["state"]
    for index, state in plain.optimizers[0].state_dict()["state"].items():
        assert torch.equal(found[index]["exp_avg"], state["exp_avg"])


def test_a_closed_pipeline_leaves_nothing_behind() -> None:
    model = layers()
    before = [dict(vars(module)) for module in model.modules()]
    for _ in range(2):
        with make_pipeline("ZBH1", 2, model=model) as pipeline:
            pipeline.step(*batch(0))
    for module, held in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == held.keys()
        assert not module._state_dict_pre_hooks


def test_two_pipelines_on_one_model_both_settle() -> None:
    model = layers()
    first, second = (make_pipeline("ZBH1", 2, model=model) for _ in range(2))
    calls: list[str] = []
    for name, pipeline in (("first", first), ("second", second)):
        hooks = pipeline._lifecycle.hooks
        hooks._settle._action = lambda name=name: calls.append(name)
    copy.deepcopy(model[0])
    assert calls == ["first", "second"]
    first._lifecycle.hooks.remove()
    copy.deepcopy(model[0])
    assert calls[2:] == ["second"]
