"""A pipeline is planned from what its layers or its steps take, when that pays."""

import copy
import logging
import time
from dataclasses import replace

import pytest
import torch
from case_models import N_LAYERS
from cases import Case, make
from pool import Pool
from torch import Tensor, nn

import zbpp
from zbpp.core import Costs, PassKind, RequestError, Schedule
from zbpp.planning import plan
from zbpp.schedules import post_validated
from zbpp.simulator import simulate, span
from zbpp.tuning import Watch, Watcher, replan

EVEN = Costs(f=1e-3, b=1e-3, w=1e-3)
SKEWED = Costs(f=(1e-3, 2e-3, 1e-3, 1e-3), b=1e-3, w=(2e-3, 0.3e-3, 1e-3, 1e-3))
PLAN = plan("ZB", n_stages=4, n_microbatches=8, memory_limit=8.0, effort="fast")
CASE = Case(n_microbatches=6, samples=12, clip=0.3)


class Steps:
    """A pipeline whose steps take the times of the costs, in seconds."""

    rank = 0

    def __init__(self, costs: Costs, schedule: Schedule = PLAN) -> None:
        self.costs, self.schedule = costs, schedule
        self.switches = 0

    def gather(self, thing: object) -> list[object]:
        return [thing]

    def switch(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.switches += 1


def watcher_of(watch: Watch, costs: Costs) -> Watcher:
    """Watch pipelines that return the times of their steps."""
    return Watcher(watch, costs, measure=lambda one, _: one.costs)


def run(watch: Watch, *phases: tuple[Costs, int]) -> list[int]:
    """Switches so far after each phase of steps."""
    steps = Steps(phases[0][0])
    watcher = watcher_of(watch, Costs(memory_limit=8.0))
    switches = []
    for costs, n_steps in phases:
        steps.costs = costs
        for _ in range(n_steps):
            watcher.after_step(steps)
        switches.append(steps.switches)
    return switches


def test_a_plan_is_made_at_the_end_of_each_window() -> None:
    watch = Watch(first=4, every=10)
    assert run(watch, (SKEWED, 3), (SKEWED, 1), (SKEWED, 50)) == [0, 1, 1]
    assert run(watch, (EVEN, 20), (SKEWED, 3), (SKEWED, 1)) == [0, 0, 1]
    assert run(replace(watch, every=None), (EVEN, 20), (SKEWED, 50)) == [0, 0]


def test_a_machine_that_slows_down_as_a_whole_keeps_its_order() -> None:
    assert run(Watch(first=4, every=10), (Costs(f=3.0, b=3.0, w=3.0), 60)) == [0]


def test_a_gain_below_the_least_gain_does_not_switch() -> None:
    found = replan(PLAN, replace(SKEWED, memory_limit=8.0), effort="fast")
    assert 0 < found.gain < 1
    watch = Watch(first=4, least_gain=found.gain * 1.01)
    assert run(watch, (SKEWED, 4)) == [0]


def test_the_new_order_takes_the_reported_time_within_the_limit() -> None:
    found = replan(PLAN, replace(SKEWED, memory_limit=3.0), effort="fast")
    assert span(simulate(found.schedule, SKEWED)) == pytest.approx(found.then)
    assert found.schedule.placement == PLAN.placement
    with pytest.raises(RequestError):
        replan(PLAN, replace(SKEWED, memory_limit=0.5), effort="fast")


def test_plans_on_slow_links_count_messages() -> None:
    slow = Costs(f=1e-3, b=1e-3, w=1e-3, comm=2e-3, optimizer=1e-3, validation=5e-3)
    sent = plan("ZB", n_stages=4, n_microbatches=8, costs=slow)
    for schedule in (sent, post_validated(sent)):
        steps = Steps(slow, schedule)
        watcher_of(Watch(first=1, window=1), Costs()).after_step(steps)
        assert steps.schedule is schedule
    blind = Steps(slow, plan("ZB", n_stages=4, n_microbatches=8))
    before = span(simulate(blind.schedule, slow))
    watcher_of(Watch(first=1, window=1), Costs()).after_step(blind)
    assert blind.switches == 1
    assert span(simulate(blind.schedule, slow)) < before


def test_a_limit_that_nothing_fits_leaves_the_schedule_as_it_is(caplog) -> None:
    steps = Steps(SKEWED)
    watcher = watcher_of(Watch(first=4), Costs(memory_limit=0.5))
    with caplog.at_level(logging.WARNING, "zbpp"):
        for _ in range(4):
            watcher.after_step(steps)
    assert steps.switches == 0 and "the schedule stays as it is" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": 0},
        {"window": 11, "first": 20},
        {"window": 5, "first": 4},
        {"every": 3},
    ],
)
def test_windows_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(RequestError, match="must be"):
        Watch(**wrong)


class Slow(nn.Module):
    """A layer whose forward takes 4 ms."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(4e-3)
        return self.inner(x)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


QUICK = Watch(first=3, window=2, least_gain=-1.0)  # takes whatever is planned


def train(n_stages: int | None, **settings: object) -> tuple[bool, dict[str, Tensor]]:
    """True if the schedule was switched; the parameters after 8 steps."""
    layers = CASE.of.layers()
    layers[6] = Slow(layers[6])
    execution = zbpp.Execution(**settings)
    pipeline = make(CASE, "auto", n_stages, model=layers, execution=execution)
    first = pipeline.schedule
    for step in range(8):
        pipeline.step(*CASE.batch(step))
    parameters = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    switched = pipeline.schedule is not first
    assert pipeline.schedule.placement == first.placement
    assert not pipeline.schedule.runs(PassKind.BW)
    pipeline.close()
    return switched, parameters


def train_quickly() -> tuple[bool, dict[str, Tensor]]:
    torch.set_num_threads(1)
    return train(None, watch=QUICK)


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_switch_alike_and_keep_the_bits(pool: Pool) -> None:
    ranks = pool.run(train_quickly, 2)
    assert all(switched for switched, _ in ranks)
    same(ranks[0][1] | ranks[1][1], train(1)[1])


# --- measured before the first step ---------------------------------------------------


def heavy_head() -> list[nn.Module]:
    wide = nn.Linear(16, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 11)
    return [*CASE.of.build(range(N_LAYERS - 1)), nn.Sequential(*wide)]


def test_a_heavy_head_gets_a_separate_stage_and_the_weights_stay() -> None:
    layers = heavy_head()
    before = nn.Sequential(*copy.deepcopy(layers)).state_dict(prefix="layers.")
    measured = make(CASE, "ZBH1", 3, model=layers, example=CASE.batch(0))
    assert [len(layers) for layers in measured.split][-1] == 1
    same(dict(measured.named_parameters()), before)
    even = make(CASE, "ZBH1", 3, model=heavy_head())
    assert [len(layers) for layers in even.split] == [3, 2, 3]


@pytest.mark.slow
def test_the_limit_applies_to_the_estimated_bytes() -> None:
    small = {"example": CASE.batch(0), "memory_limit": "20KiB"}
    with pytest.raises(RequestError, match="the smallest limit that works"):
        make(CASE, "auto", 2, **small)
    pipeline = make(CASE, "auto", 2, **small | {"memory_limit": "1GiB"})
    assert sum(pipeline.schedule.split) == N_LAYERS


def test_an_example_that_is_no_pair_is_refused() -> None:
    with pytest.raises(RequestError, match=r"give \(inputs, targets\) of one step"):
        make(CASE, "auto", 2, example=CASE.batch(0)[0])
