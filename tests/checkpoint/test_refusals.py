"""A state that does not fit is refused by name and number, and changes nothing."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small
import torch
from case_models import WIDTH
from faulty_training import batch, make
from same import difference
from torch import nn

import zbpp
from zbpp.checkpoint import CheckpointError
from zbpp.core import RequestError

State = dict[str, Any]
WEIGHT, BIAS = "layers.3.norm.weight", "layers.3.norm.bias"


def trained(n_steps: int, **more: Any) -> zbpp.Pipeline:
    pipeline = make("ZBH1", 2, **more)
    for step in range(n_steps):
        pipeline.step(*batch(step))
    return pipeline


def copied(pipeline: zbpp.Pipeline) -> State:
    return copy.deepcopy(pipeline.state_dict())


def entry(state: State, name: str = BIAS) -> dict[str, Any]:
    """The optimizer's state of a parameter."""
    return state["optimizer"][name][0]


CHANGES: list[tuple[str, Callable[[State], object]]] = [
    (f"{WEIGHT} is missing", lambda s: s["model"].pop(WEIGHT)),
    (
        "layers.9.weight is unknown here",
        lambda s: s["model"].update({"layers.9.weight": torch.zeros(2)}),
    ),
    (
        rf"{BIAS} has shape \(9,\), the model's \({WIDTH},\)",
        lambda s: s["model"].update({BIAS: torch.zeros(9)}),
    ),
    (
        f"{BIAS} has dtype torch.float64, the model's torch.float32",
        lambda s: s["model"].update({BIAS: s["model"][BIAS].double()}),
    ),
    (f"optimizer's state of {BIAS} is missing", lambda s: s["optimizer"].pop(BIAS)),
    (
        "the optimizer's state of other is unknown here",
        lambda s: s["optimizer"].update(other=s["optimizer"][BIAS]),
    ),
    (
        rf"exp_avg of {BIAS} has shape \(9,\), the parameter \({WIDTH},\)",
        lambda s: entry(s)["state"].update(exp_avg=torch.zeros(9)),
    ),
    (
        "is that of SGD, and the optimizer is AdamW",
        lambda s: entry(s).update(kind="SGD"),
    ),
    (
        "are in one parameter group, but were saved with different options",
        lambda s: entry(s)["options"].update(lr=7.0),
    ),
    (r"the number of steps \(step\) is missing", lambda s: s.pop("step")),
    ("the state of the run", lambda s: s.pop("run")),
    (
        "saved with a loss scale, and this run is without",
        lambda s: s["run"].update(scaler={"scale": 2.0, "good_steps": 0}),
    ),
    (
        r"call pipeline.attach\(\*schedulers\) first",
        lambda s: s.update(schedulers={"StepLR 0 of AdamW 0": {}}),
    ),
    ("it has no 'model'", lambda s: s.pop("model")),
]


@pytest.fixture(scope="module")
def state() -> State:
    """After two steps."""
    return copied(trained(2))


@pytest.fixture(scope="module")
def other() -> zbpp.Pipeline:
    """After one."""
    return trained(1)


@pytest.mark.parametrize(("words", "change"), CHANGES)
def test_a_mismatch_is_named_and_nothing_changes(
    words: str, change: Callable[[State], object], state: State, other: zbpp.Pipeline
) -> None:
    before, bad = copied(other), copy.deepcopy(state)
    change(bad)
    with pytest.raises(RequestError, match=words):
        other.load_state_dict(bad)
    assert difference(before, copied(other)) is None


def test_a_state_that_fits_is_loaded(state: State) -> None:
    """The control of the refusals; and the model alone leaves the rest."""
    pipeline = trained(1)
    before = copied(pipeline)
    pipeline.load_state_dict(state, model_only=True)
    after = copied(pipeline)
    assert difference(after, before | {"model": state["model"]}) is None
    assert difference(state, before) is not None
    pipeline.load_state_dict(state)
    assert difference(state, copied(pipeline)) is None


def test_an_option_that_torch_writes_as_0_may_have_grown() -> None:
    optimizer = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)}
    pipeline = trained(2, **optimizer)
    for one in pipeline.optimizers:
        one.param_groups[0]["weight_decay"] = 0.05
    state, fresh = copied(pipeline), trained(1, **optimizer)
    fresh.load_state_dict(state)
    assert [x.param_groups[0]["weight_decay"] for x in fresh.optimizers] == [0.05] * 2


def test_rates_may_be_numbers_or_tensors(tmp_path: Path) -> None:
    def pipeline_with(rate: Any) -> zbpp.Pipeline:
        return trained(1, optimizer=lambda ps: torch.optim.SGD(ps, lr=rate))

    source = pipeline_with(0.5)
    for step, rate in enumerate((torch.tensor(1.0), torch.tensor(2.0), 3.0)):
        source.save(tmp_path / str(step), wait=True)
        source = pipeline_with(rate)
        source.load(tmp_path / str(step))
        assert [one.param_groups[0]["lr"] for one in source.optimizers] == [0.5] * 2


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trained(1).save(tmp_path, wait=True)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH))
    other = small.make(model, "1F1B", n_stages=1)
    with pytest.raises(RequestError, match=r"0.weight is missing; .* and \d+ more"):
        other.load(tmp_path)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"file": Path("x")}, "extra/file is a PosixPath"),
        ({"table": torch.eye(2).to_sparse()}, "extra/table is a tensor of layout spa"),
        (
            {"numbers": torch.zeros(1, dtype=torch.complex128)},
            r"files store no torch\.complex128",
        ),
    ],
)
def test_a_value_that_no_file_can_store_is_refused(
    extra: dict[str, Any], words: str, tmp_path: Path
) -> None:
    pipeline = trained(1)
    with pytest.raises(RequestError, match=words):
        pipeline.save(tmp_path, extra=extra, wait=True)
    pipeline.step(*batch(1))


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    pipeline = trained(1)
    with pytest.raises(CheckpointError, match="cannot write to"):
        pipeline.save(tmp_path / "file")
    pipeline.step(*batch(1))
