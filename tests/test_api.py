"""`zbpp.Pipeline` has few parameters; what it took before is taken with a warning."""

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import adamw, batch, build, loss_fn

import zbpp
from zbpp import diagnostics

MADE_OF: dict[str, Any] = {
    "optimizer": adamw,
    "loss_fn": loss_fn,
    "n_stages": 2,
    "n_microbatches": 6,
}
OLD: dict[str, Any] = {
    "seed": 7,
    "first_step": 3,
    "exact_sums": True,
    "weigh": "samples",
    "post_validation": True,
    "max_consecutive_skips": 2,
    "watch": False,
    "timeout_s": 30.0,
    "n_layers": 9,
    "split": (4, 5),
    "recompute": {0, 2},
    "shard": "none",
}


def layers() -> Any:
    return zbpp.layers_from(build, n_layers=9)


def parameters(pipeline: zbpp.Pipeline) -> list[torch.Tensor]:
    for step in range(2):
        pipeline.step(*batch(step))
    return [p.detach() for _, p in pipeline.named_parameters()]


def test_the_constructor_has_twelve_parameters_and_no_ancestors() -> None:
    assert len(inspect.signature(zbpp.Pipeline).parameters) == 12
    assert zbpp.Pipeline.__mro__ == (zbpp.Pipeline, object)


def test_old_keywords_are_taken_each_with_a_warning_that_names_the_new_place() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old = zbpp.Pipeline(build, schedule="ZBH1", **MADE_OF, **OLD)
    texts = [str(one.message) for one in caught if one.category is FutureWarning]
    assert len(texts) == len(OLD)
    for name in OLD:
        (text,) = (text for text in texts if f" {name}= has moved" in text)
        assert "zbpp." in text.partition("give ")[2]
    assert {one.filename for one in caught} == {__file__}
    model = layers()
    plan = zbpp.plan_model(
        model, "ZBH1", n_stages=2, n_microbatches=6, split=(4, 5), recompute={0, 2}
    )
    new = zbpp.Pipeline(
        model,
        plan,
        optimizer=adamw,
        loss_fn=loss_fn,
        numerics=zbpp.Numerics(seed=7, first_step=3),
        step=zbpp.StepPolicy(post_validation=True),
    )
    assert old.plan.recompute == new.plan.recompute == {0, 2}
    assert old.n_steps == new.n_steps == 3
    for left, right in zip(parameters(old), parameters(new), strict=True):
        assert torch.equal(left, right)


def test_an_unknown_keyword_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match=r"'n_microbatch'; did you mean n_microbatches"):
        zbpp.Pipeline(layers(), optimizer=adamw, n_microbatch=2)
    with pytest.raises(TypeError, match=r"takes no keyword 'xyz'$"):
        zbpp.Pipeline(layers(), optimizer=adamw, xyz=2)


def test_a_policy_of_another_kind_is_refused() -> None:
    with pytest.raises(zbpp.RequestError, match=r"step is an int; give a zbpp.StepPol"):
        zbpp.Pipeline(layers(), optimizer=adamw, loss_fn=loss_fn, step=2)


def test_methods_that_are_functions_now_are_taken_with_a_warning() -> None:
    pipeline = zbpp.Pipeline(layers(), "ZBH1", **MADE_OF)
    pipeline.step(*batch(0))
    with pytest.warns(FutureWarning, match=r"call zbpp.diagnostics.timelines\(pipe"):
        old = pipeline.timelines(1)
    assert old == diagnostics.timelines(pipeline, 1)
    with pytest.warns(FutureWarning, match=r"chosen has moved; give pipeline.plan"):
        assert pipeline.chosen is pipeline.plan


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
