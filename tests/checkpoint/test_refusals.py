"""A state that does not fit is refused by name and number, and changes nothing."""

import copy

import pytest
import torch
from small_model import adamw, batch, make_pipeline
from torch import nn

from zbpp.checkpoint import CheckpointError
from zbpp.core import RequestError
from zbpp.pipeline import Pipeline


def made(steps: int = 1, **more) -> Pipeline:
    pipeline = make_pipeline("ZBH1", 2, **more)
    for step in range(steps):
        pipeline.step(*batch(step))
    return pipeline


def frozen(pipeline: Pipeline):
    return copy.deepcopy(pipeline.state_dict())


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(
            same(left[k], right[k]) for k in left
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def drop(state):
    del state["model"]["layers.3.up.weight"]
    return "layers.3.up.weight is missing"


def add(state):
    state["model"]["layers.9.weight"] = torch.zeros(2)
    return "layers.9.weight is unknown here"


def reshape(state):
    state["model"]["layers.1.norm.bias"] = torch.zeros(17)
    return r"layers.1.norm.bias has shape \(17,\), the model's \(16,\)"


def cast(state):
    state["model"]["layers.0.weight"] = state["model"]["layers.0.weight"].double()
    return "layers.0.weight has dtype torch.float64, the model's torch.float32"


def drop_moments(state):
    del state["optimizer"]["layers.8.bias"]
    return "the optimizer's state of layers.8.bias is missing"


def add_moments(state):
    state["optimizer"]["other"] = state["optimizer"]["layers.8.bias"]
    return "the optimizer's state of other is unknown here"


def reshape_moments(state):
    one = state["optimizer"]["layers.8.weight"][0]["state"]
    one["exp_avg"] = torch.zeros(11, 17)
    return r"exp_avg of layers.8.weight has shape \(11, 17\), the parameter \(11, 16\)"


def other_optimizer(state):
    state["optimizer"]["layers.8.bias"][0]["kind"] = "SGD"
    return "is that of SGD, and the optimizer is AdamW"


def other_options(state):
    state["optimizer"]["layers.8.bias"][0]["options"]["lr"] = 7.0
    return "are in one parameter group, but were saved with different options"


def drop_step(state):
    del state["step"]
    return r"the number of steps \(step\) is missing"


def drop_run(state):
    del state["run"]
    return "the state of the run"


def add_scaler(state):
    state["run"]["scaler"] = {"scale": 2.0, "good_steps": 0}
    return "saved with a loss scale, and this run is without"


def add_scheduler(state):
    state["schedulers"] = {"StepLR 0 of AdamW 0": {}}
    return r"call pipeline.attach\(\*schedulers\) first"


def drop_model(state):
    del state["model"]
    return "it has no 'model'"


WAYS = [
    drop,
    add,
    reshape,
    cast,
    drop_moments,
    add_moments,
    reshape_moments,
    other_optimizer,
    other_options,
    drop_step,
    drop_run,
    add_scaler,
    add_scheduler,
    drop_model,
]


def test_misfits_are_named_and_nothing_changes() -> None:
    state = frozen(made(2))
    pipeline = made(1)
    before = frozen(pipeline)
    for way in WAYS:
        bad = copy.deepcopy(state)
        words = way(bad)
        with pytest.raises(RequestError, match=words):
            pipeline.load_state_dict(bad)
        assert same(before, frozen(pipeline)), way.__name__
    pipeline.load_state_dict(state)
    assert same(state, frozen(pipeline))


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_an_option_that_torch_writes_as_0_may_have_grown() -> None:
    pipeline = made(2, optimizer=sgd)
    for optimizer in pipeline.optimizers:
        optimizer.param_groups[0]["weight_decay"] = 0.05
    state, fresh = frozen(pipeline), made(1, optimizer=sgd)
    fresh.load_state_dict(state)
    decays = [x.param_groups[0]["weight_decay"] for x in fresh.optimizers]
    assert decays == [0.05, 0.05]
    for entries in state["optimizer"].values():
        entries[0]["options"]["weight_decay"] = "much"
    with pytest.raises(RequestError, match=r"weight_decay of .* is 'much', no number"):
        fresh.load_state_dict(state)


def test_the_model_alone_leaves_the_rest() -> None:
    state = frozen(made(2))
    pipeline = made(1)
    before = frozen(pipeline)
    pipeline.load_state_dict(state, model_only=True)
    after = frozen(pipeline)
    assert same(after["model"], state["model"])
    assert same(after["optimizer"], before["optimizer"]) and after["step"] == 1


def test_a_checkpoint_of_another_model_is_refused(tmp_path) -> None:
    pipeline = made(1)
    pipeline.save(tmp_path, wait=True)
    other = Pipeline(
        nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 11)),
        loss_fn=nn.functional.cross_entropy,
        optimizer=adamw,
        schedule="1F1B",
        n_microbatches=2,
        n_stages=1,
    )
    with pytest.raises(RequestError, match=r"0.weight is missing; .* and \d+ more"):
        other.load(tmp_path)


def test_what_a_checkpoint_cannot_hold_is_said(tmp_path) -> None:
    pipeline = made(1)
    with pytest.raises(RequestError, match="extra/file is a PosixPath"):
        pipeline.save(tmp_path, extra={"file": tmp_path})
    with pytest.raises(CheckpointError, match=r"files hold no torch\.complex128"):
        extra = {"numbers": torch.zeros(1, dtype=torch.complex128)}
        pipeline.save(tmp_path, extra=extra, wait=True)
    with pytest.raises(RequestError, match="extra/table is a tensor of layout sparse"):
        pipeline.save(tmp_path, extra={"table": torch.eye(2).to_sparse()})
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write to"):
        pipeline.save(tmp_path / "file")
    pipeline.step(*batch(1))
