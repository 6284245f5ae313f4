"""A step that an exception ends has not happened, or its state is refused by name."""

from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from torch import Tensor, nn

from zbpp.pipeline import Pipeline
from zbpp.runtime.replay import Replay

N_STEPS, TORN, M = 6, 3, 4
NORMS = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
WAYS = [(mode, validated) for mode in ("ZBV", "1F1B") for validated in (True, False)]
# a hook on the first layer warns that its input needs no gradient
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def make(norm: str, mode: str, post_validation: bool) -> Pipeline:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(8, 8), NORMS[norm](8), nn.Dropout(0.3))
        for _ in range(4)
    ]
    return flat_pipeline(
        nn.Sequential(*layers),
        loss_fn=lambda y, t: ((y - t) ** 2).mean(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.05),
        schedule=mode,
        n_stages=2,
        n_microbatches=M,
        post_validation=post_validation,
        clip_grad_norm=0.5,
        seed=3,
    )


def train(pipeline: Pipeline, steps: range) -> Pipeline:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        draws = torch.randn(2, 4 * M, 8, generator=generator)
        pipeline.step(draws[0], draws[1])
    return pipeline


def state_of(pipeline: Pipeline) -> dict[str, Any]:
    state = pipeline.state_dict()
    found = {"steps": state["step"], **state["model"]}
    for name, entries in state["optimizer"].items():
        for place, entry in enumerate(entries):
            for key, value in entry["state"].items():
                found[f"{name}, {place}, {key}"] = value
    return found


def is_same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(value, right[key]) if isinstance(value, Tensor)
        else value == right[key]
        for key, value in left.items()
    )  # fmt: skip


def interrupt(pipeline: Pipeline, passes: str, number: int) -> bool:
    """Raise in a step before a pass of a layer; False if there are not so many."""
    calls = count(1)

    def hook(*_: Any) -> None:
        if next(calls) == number:
            raise KeyboardInterrupt

    handles = [
        layer.register_forward_pre_hook(hook)
        if passes == "forward"
        else layer.register_full_backward_pre_hook(hook)
        for _, layer in pipeline.named_layers()
    ]
    try:
        train(pipeline, range(TORN, TORN + 1))
    except KeyboardInterrupt:
        return True
    finally:
        for handle in handles:
            handle.remove()
    return False


def goes_on_right(
    norm: str, way: tuple[str, bool], point: tuple[str, int], folder: Path
) -> bool | None:
    """Interrupt, save, load, go on; None: there is no such point."""
    torn = train(make(norm, *way), range(TORN))
    if not interrupt(torn, *point):
        return None
    torn.save(folder, wait=True)
    with make(norm, *way) as resumed:
        resumed.load(folder)
        assert resumed.n_steps == TORN
        train(resumed, range(TORN, N_STEPS))
        return is_same(state_of(resumed), whole_state(norm, way))


@cache
def whole_state(norm: str, way: tuple[str, bool]) -> dict[str, Any]:
    """The state after an undisturbed run."""
    with train(make(norm, *way), range(N_STEPS)) as pipeline:
        return state_of(pipeline)


def all_points() -> Iterator[tuple[str, int]]:
    for passes in ("forward", "backward"):
        for number in (1, 4, 6, 9, 11, 14, 16):
            yield passes, number


@pytest.mark.parametrize(
    ("way", "point"),
    list(zip(WAYS, [("forward", 7), ("backward", 16)] * 2, strict=True)),
)
def test_an_interrupted_step_has_not_happened(
    way: tuple[str, bool], point: tuple[str, int], tmp_path: Path
) -> None:
    assert goes_on_right("batch", way, point, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "way"), [("batch", ("ZBV", True)), ("layer", ("1F1B", False))]
)
def test_it_has_not_happened_wherever_it_is_interrupted(
    norm: str, way: tuple[str, bool], tmp_path: Path
) -> None:
    for point in all_points():
        folder = tmp_path / f"{point[0]}{point[1]}"
        assert goes_on_right(norm, way, point, folder), point
    assert goes_on_right(norm, way, ("forward", 4 * M + 1), tmp_path) is None


@pytest.mark.parametrize("way", WAYS)
def test_a_torn_optimizer_step_is_refused_by_name(
    way: tuple[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = train(make("batch", *way), range(TORN))
    pipeline.synchronize()
    calls = count()
    step = torch.optim.AdamW.step

    def torn(self: Any, *args: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return step(self, *args)

    # the step behind the barrier, and the one that follows an invalid one
    monkeypatch.setattr(torch.optim.AdamW, "step", torn)
    with pytest.raises(KeyboardInterrupt):
        train(pipeline, range(TORN, TORN + 2))
    for access in (pipeline.state_dict, lambda: pipeline.save(tmp_path)):
        with pytest.raises(RuntimeError, match=r"^step \d .* load a checkpoint in a"):
            access()


def test_a_step_with_all_its_gradients_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is whole on all stages when the exception comes, and the error says so."""
    way = WAYS[-1]
    pipeline = train(make("batch", *way), range(TORN))
    with monkeypatch.context() as patch:

        def torn(self: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(Replay, "end", torn)
        with pytest.raises(KeyboardInterrupt) as error:
            train(pipeline, range(TORN, TORN + 1))
    assert "step 3 had all its gradients and counts" in error.value.__notes__[-1]
    with train(make("batch", *way), range(TORN + 1)) as whole:
        assert is_same(state_of(pipeline), state_of(whole))
