"""A model's layers are split by their costs, by a schedule, or as asked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zbpp
from zbpp.core import LayerCosts, write_layers
from zbpp.planning import PlanRequest, make_plan

N_LAYERS = 9
TIMES = (0.5, *(1.0,) * (N_LAYERS - 2), 4.0)
LAYERS = LayerCosts(n_layers=N_LAYERS, f=TIMES, b=TIMES, w=TIMES)
SIZES = {"n_stages": 3, "n_microbatches": 4}
PLAN = make_plan(PlanRequest(schedule="ZBH1", costs=LAYERS, **SIZES))
COSTED = {"layer_costs": LAYERS}


def split(schedule: Any = "ZBH1", **asked: Any) -> tuple[int, ...]:
    """The layers of each stage of a pipeline; its schedule says the same."""
    layers = [nn.Linear(2, 2) for _ in range(N_LAYERS)]
    settings: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "optimizer": None}
    if isinstance(schedule, str):
        settings |= SIZES
    plan = zbpp.plan_model(layers, schedule, **asked, **settings)
    pipeline = zbpp.Pipeline(layers, plan, device=torch.device("cpu"), **settings)
    sizes = tuple(map(len, pipeline.split))
    assert plan.schedule.split in (None, sizes)
    return sizes


def test_costs_of_layers_balance_the_split(tmp_path: Path) -> None:
    write_layers(LAYERS, file := tmp_path / "layers.json")
    balanced = split(**COSTED)
    assert balanced == PLAN.split
    assert balanced not in ((3, 3, 3), (1, 1, 7)) and balanced[2] == 1
    assert split(split="balanced", **COSTED) == split(layer_costs=file) == balanced
    for even in ({}, {"split": "even", **COSTED}):
        assert split(**even) == (3, 3, 3)
    # 1F1B holds four micro-batches on stage 0: two layers fit
    assert (
        split("1F1B", memory_limit=6.0, **COSTED)[0] == 2 < split("1F1B", **COSTED)[0]
    )


@pytest.mark.slow
def test_an_explicit_split_wins_over_costs_and_the_schedule() -> None:
    planned, plain = PLAN.schedule, zbpp.plan("ZBH1", **SIZES)
    assert split(split=(1, 1, 7), **COSTED) == (1, 1, 7)
    assert split(planned, split=[1, 1, 7]) == (1, 1, 7)
    assert split(planned) == split(planned, **COSTED) == PLAN.split
    assert split(planned, split="even") == split(plain) == (3, 3, 3)
    assert split(plain, **COSTED)[2] == 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"split": "unequal", **COSTED}, "choose balanced or even"),
        ({"layer_costs": LayerCosts(n_layers=8)}, "of 8 layers, but the model has 9"),
        ({"costs": zbpp.Costs(), **COSTED}, "leave costs out"),
        ({"split": (3, 3, 2), **COSTED}, "add up to 9 layers"),
    ],
)
def test_what_does_not_fit_is_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(zbpp.RequestError, match=words):
        split(**asked)
