"""`zbpp.Pipeline` has few parameters, takes policies and plans, and refuses others."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from small_model import adamw, build, loss_fn

import zbpp

MADE_OF: dict[str, Any] = {
    "optimizer": adamw,
    "loss_fn": loss_fn,
    "n_stages": 2,
    "n_microbatches": 6,
}


def layers() -> Any:
    return zbpp.layers_from(build, n_layers=9)


def test_the_constructor_has_twelve_parameters_and_no_ancestors() -> None:
    assert len(inspect.signature(zbpp.Pipeline).parameters) == 12
    assert zbpp.Pipeline.__mro__ == (zbpp.Pipeline, object)


def test_a_policy_of_another_kind_is_refused() -> None:
    with pytest.raises(zbpp.RequestError, match=r"step is an int; give a zbpp.StepPol"):
        zbpp.Pipeline(layers(), optimizer=adamw, loss_fn=loss_fn, step=2)


def test_a_plan_runs_and_travels_by_file(tmp_path: Path) -> None:
    model = layers()
    plan = zbpp.plan_model(
        model, "ZBV", n_stages=2, n_microbatches=6, split=(1, 4, 3, 1)
    )
    plan.save(tmp_path / "plan.json")
    made_of = {"optimizer": adamw, "loss_fn": loss_fn}
    for source in (plan, plan.schedule, tmp_path / "plan.json"):
        pipeline = zbpp.Pipeline(model, source, **made_of)
        assert [len(part) for part in pipeline.split] == [1, 4, 3, 1]
    with pytest.raises(zbpp.RequestError, match="model has 4"):
        zbpp.Pipeline(zbpp.layers_from(build, n_layers=4), plan, **made_of)


def test_layers_come_from_a_function() -> None:
    with pytest.raises(zbpp.RequestError, match="build is a list; give a function"):
        zbpp.layers_from(build(range(2)), n_layers=2)
