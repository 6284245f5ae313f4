"""A pipeline split by the costs of its layers, by a schedule, or as asked."""

import pytest
from flat import flat_pipeline
from layer_plan import plan_layers
from small_model import N_LAYERS, adamw, build, loss_fn, refusal

from zbpp.core import Costs, LayerCosts, Schedule, write_layers
from zbpp.pipeline import Pipeline
from zbpp.planning import plan

TIMES = (0.5, *(1.0,) * (N_LAYERS - 2), 4.0)
LAYERS = LayerCosts(n_layers=N_LAYERS, f=TIMES, b=TIMES, w=TIMES)


def pipeline(schedule: str | Schedule = "ZBH1", **options: object) -> Pipeline:
    sizes = {} if isinstance(schedule, Schedule) else {"n_microbatches": 4}
    return flat_pipeline(
        build,
        **{
            "n_layers": N_LAYERS,
            "loss_fn": loss_fn,
            "optimizer": adamw,
            "schedule": schedule,
            "n_stages": 3,
            **sizes,
            **options,
        },
    )


def sizes_of(made: Pipeline) -> tuple[int, ...]:
    return tuple(map(len, made.split))


def test_balanced_is_the_default_once_costs_are_known(tmp_path) -> None:
    planned = plan_layers("ZBH1", LAYERS, n_stages=3, n_microbatches=4)
    assert planned.split not in ((3, 3, 3), (1, 1, 7)) and planned.split[2] == 1
    path = tmp_path / "layers.json"
    write_layers(LAYERS, path)
    for options in ({}, {"split": "balanced"}, {"layer_costs": path}, {"split": None}):
        made = pipeline(**{"layer_costs": LAYERS, **options})
        assert sizes_of(made) == planned.split == made.schedule.split
    assert sizes_of(pipeline()) == (3, 3, 3)  # the control: without costs
    assert sizes_of(pipeline(split="even", layer_costs=LAYERS)) == (3, 3, 3)


@pytest.mark.slow
def test_an_explicit_split_wins_over_costs_and_over_the_schedule() -> None:
    planned = plan_layers("ZBH1", LAYERS, n_stages=3, n_microbatches=4).schedule
    assert sizes_of(pipeline(split=(1, 1, 7), layer_costs=LAYERS)) == (1, 1, 7)
    made = pipeline(planned, split=[1, 1, 7])
    assert sizes_of(made) == (1, 1, 7) == made.schedule.split
    assert sizes_of(pipeline(planned)) == planned.split
    assert sizes_of(pipeline(planned, layer_costs=LAYERS)) == planned.split
    assert sizes_of(pipeline(planned, split="even")) == (3, 3, 3)
    plain = plan("ZBH1", n_stages=3, n_microbatches=4)
    assert sizes_of(pipeline(plain)) == (3, 3, 3)
    balanced = pipeline(plain, layer_costs=LAYERS)
    assert sizes_of(balanced)[2] == 1


def test_the_memory_limit_counts_for_the_split() -> None:
    """4 micro-batches of 1F1B on stage 0: at most 2 layers fit into 6."""
    options = {"layer_costs": LAYERS, "memory_limit": 6.0}
    made = pipeline("1F1B", n_stages=3, **options)
    assert (
        sizes_of(made)[0] == 2 and sizes_of(pipeline("1F1B", layer_costs=LAYERS))[0] > 2
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "unequal", "layer_costs": LAYERS}, "choose balanced or even"),
        (
            {"layer_costs": LayerCosts(n_layers=8)},
            "costs of 8 layers, but the model has 9",
        ),
        ({"layer_costs": LAYERS, "costs": Costs()}, "leave costs out"),
        ({"layer_costs": LAYERS, "split": (3, 3, 2)}, "add up to 9 layers"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict, message: str) -> None:
    assert message in refusal(lambda: pipeline(**options))
