"""Joint plans of split and schedule: never worse than even, and what is asked for."""

from random import Random

import pytest
from layer_plan import plan_layers

from zbpp.core import LayerCosts, Placement, RequestError, peaks, write_schedule
from zbpp.planning import plan
from zbpp.schedules import balance, even_split

TIMES = (0.5, *(1.0,) * 14, 3.0)
LAYERS = LayerCosts(n_layers=16, f=TIMES, b=TIMES, w=TIMES)


def llama(limit: float | None) -> LayerCosts:
    """32 layers of the same work; the last one has a head worth 2.4 more."""
    times = (1.0,) * 31 + (3.4,)
    return LayerCosts(n_layers=32, f=times, b=times, w=times, memory_limit=limit)


def test_a_heavy_head_is_worth_a_fifth_of_the_step() -> None:
    """Share of the step beyond perfect balance, 8 stages, 24 micro-batches, limit p."""
    found = plan_layers("ZB", llama(32.0), n_stages=8, n_microbatches=24, effort="fast")
    ideal = 24 * 3 * 34.4 / 8
    assert found.even_step is not None and found.gain is not None
    assert 1 - ideal / found.even_step == pytest.approx(0.328, abs=5e-4)
    assert 1 - ideal / found.step <= 0.172
    assert found.gain == pytest.approx(1 - found.step / found.even_step)


def test_the_plan_carries_its_split_and_keeps_the_limit() -> None:
    found = plan_layers("zbv", llama(24.0), n_stages=4, n_microbatches=8, effort="fast")
    assert found.schedule.split == found.split and sum(found.split) == 32
    assert len(found.split) == 8 and found.schedule.placement == Placement.wave(4)
    assert found.peak <= 24.0 and found.schedule.costs == found.costs
    assert found.costs.f == llama(None).on(Placement.wave(4), found.split).f


@pytest.mark.parametrize("mode", ["1F1B", "VPP", "ZBH1", "ZBVPP"])
def test_no_mode_loses_by_a_split_of_its_own(mode: str) -> None:
    rng = Random(mode)
    for _ in range(3):
        times = tuple(rng.choice((0.5, 1.0, 2.0, 3.0)) for _ in range(10))
        layers = LayerCosts(n_layers=10, f=times, b=times, w=times, comm=0.1)
        sizes = {"n_stages": 2, "n_microbatches": 4, "effort": "fast"}
        found = plan_layers(mode, layers, **sizes)
        even = plan_layers(mode, layers, split="even", **sizes)
        assert even.split == even_split(10, len(even.split))
        assert found.even_step == pytest.approx(even.step)
        assert found.step <= even.step * (1 + 1e-9)


def test_auto_takes_the_best_placement_with_its_own_split() -> None:
    sizes = {"n_stages": 4, "n_microbatches": 6, "effort": "fast"}
    found = plan_layers("auto", LAYERS, **sizes)
    others = [plan_layers(mode, LAYERS, **sizes) for mode in ("ZB", "ZBV", "VPP")]
    assert found.step <= min(one.step for one in others) * (1 + 1e-9)
    assert found.schedule.name.startswith("auto: ")


def test_where_a_mode_holds_much_the_early_stages_get_few_layers() -> None:
    """1F1B holds p - s micro-batches: by loads alone no split would fit."""
    layers = LayerCosts(n_layers=32, memory_limit=13.0)
    found = plan_layers("1F1B", layers, n_stages=8, n_microbatches=16, effort="fast")
    assert found.split[0] == 1 and found.even_step is None and found.gain is None
    memory = found.costs.on(found.schedule.placement)
    assert max(peaks(found.schedule.orders, memory)) <= 13.0


def test_an_explicit_split_is_kept() -> None:
    found = plan_layers(
        "ZBH1", LAYERS, n_stages=4, n_microbatches=8, split=(2, 2, 2, 10), effort="fast"
    )
    assert found.split == (2, 2, 2, 10) == found.schedule.split
    assert found.gain is not None and found.gain < 0


def test_recomputed_layers_are_in_the_times_and_in_the_schedule() -> None:
    layers = LayerCosts(n_layers=4, m_r=0.1)
    sizes = {"n_stages": 2, "n_microbatches": 4, "split": "even", "effort": "fast"}
    plain = plan_layers("ZBH1", layers, **sizes)
    found = plan_layers("ZBH1", layers, recompute=[0, 2, 3], **sizes)
    assert found.schedule.recompute == ((0,), True) and plain.schedule.recompute is None
    assert found.step > plain.step and found.peak < plain.peak


def test_a_file_keeps_its_split_unless_another_is_asked_for(tmp_path) -> None:
    sizes = {"n_stages": 4, "n_microbatches": 8, "effort": "fast"}
    asked = plan_layers("ZBH1", LAYERS, split=(1, 6, 6, 3), **sizes)
    path = tmp_path / "plan.json"
    write_schedule(asked.schedule, path)
    assert plan_layers(str(path), LAYERS).split == (1, 6, 6, 3)
    assert plan_layers(str(path), LAYERS, split="even").split == (4, 4, 4, 4)
    balanced = plan_layers(str(path), LAYERS, split="balanced")
    assert balanced.step < asked.step
    with pytest.raises(RequestError, match="is for 16 layers"):
        plan_layers(str(path), LayerCosts(n_layers=20))


def test_what_cannot_be_split_is_refused() -> None:
    sizes = {"n_stages": 4, "n_microbatches": 8}
    with pytest.raises(RequestError, match="16 layers cannot fill 20 chunks"):
        plan_layers("VPP", LAYERS, chunks_per_stage=5, **sizes)
    with pytest.raises(RequestError, match="smallest limit that works is 4"):
        plan_layers("ZBH1", llama(3.0), n_stages=8, n_microbatches=8)


def test_layers_planned_evenly_are_what_a_mode_plans() -> None:
    """The control of `step`: it is the span that the mode's own plan has."""
    layers = LayerCosts(n_layers=8)
    found = plan_layers("ZBV", layers, n_stages=2, n_microbatches=4)
    costs = layers.on(Placement.wave(2), (2, 2, 2, 2))
    direct = plan("ZBV", n_stages=2, n_microbatches=4, costs=costs)
    assert found.even_step == found.step
    assert found.schedule.orders == direct.orders


@pytest.mark.slow
def test_layers_move_where_the_planner_says_though_the_load_is_the_same() -> None:
    """The control is the balanced split itself: same largest load, longer plan."""
    placement, m = Placement.single(8), 24
    f, b, w = (
        tuple(t * h for h in (*(1.0,) * 31, 3.4)) for t in (2.602, 2.551, 1.92575)
    )
    layers = LayerCosts(32, f, b, w, comm=0.408, m_w=0.432432, memory_limit=32.0)
    split = balance(layers, placement, m).split
    sizes = {"n_stages": 8, "n_microbatches": m}
    balanced = plan_layers("ZB", layers, split=split, **sizes)
    joint = plan_layers("ZB", layers, **sizes)
    assert joint.split != split and joint.step < 0.995 * balanced.step
