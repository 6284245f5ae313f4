"""Layers that B computes again give the same bits, and hold less from F to B."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from changing import (
    Change,
    Layer,
    in_place,
    pythons_numbers,
    replaced,
    running_mean,
    unmarked_mean,
)
from flat import flat_pipeline
from pool import Pool
from small_model import (
    N_LAYERS,
    assert_same,
    batch,
    build,
    make_pipeline,
    refusal,
    train,
)
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from zbpp.core import Costs, Recompute, Schedule
from zbpp.planning import plan
from zbpp.planning.answer import recomputed_layers
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.stage import Stage

WITH_DROPOUT = {"model": lambda layers: build(layers, dropout=0.3)}


def again(mode: str, n_stages: int, which: Recompute = True) -> Schedule:
    schedule = plan(mode, n_stages=n_stages, n_microbatches=6)
    chunks = schedule.placement.n_chunks
    return replace(schedule, recompute=(which, *[True] * (chunks - 1)))


def assert_no_difference(mode: str, n_stages: int, **more: Any) -> None:
    torch.manual_seed(5)
    losses, validation, parameters = train(mode, n_stages, **more)
    torch.manual_seed(5)
    found = train(again(mode, n_stages), None, **more)
    assert found[:2] == (losses, validation)
    assert_same(found[2], parameters)


@pytest.mark.parametrize(
    "more",
    [
        WITH_DROPOUT | {"autocast": torch.bfloat16},
        {"exact_sums": False},
    ],
    ids=["bf16", "in place"],
)
def test_settings_change_nothing_about_it(more: dict[str, Any]) -> None:
    assert_no_difference("ZBV", 2, **more)


def rolled_back(schedule: Schedule) -> tuple[Any, dict[str, Tensor]]:
    """Losses, norms and rollbacks, and this process's parameters, after four steps."""
    torch.manual_seed(5)
    pipeline = make_pipeline(
        schedule, None, **WITH_DROPOUT, seed=3,
        clip_grad_norm=0.3, post_validation=True,
    )  # fmt: skip
    results = [pipeline.step(*batch(step)) for step in range(4)]
    held = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    pipeline.close()
    return [(r.loss, r.grad_norm, r.rollbacks) for r in results], held


@pytest.mark.dist
def test_two_processes_recompute_to_the_same_bits(pool: Pool) -> None:
    schedule = again("ZBV", 2)
    recomputed = pool.run(rolled_back, 2, schedule)
    plain = pool.run(rolled_back, 2, replace(schedule, recompute=None))
    for (numbers, held), found in zip(plain, recomputed, strict=True):
        assert any(rollbacks for *_, rollbacks in numbers)
        assert found[0] == numbers
        assert_same(found[1], held)


def normed(layer: Any, x: Tensor) -> Tensor:
    return layer.norm(layer.bounded(x))


CHANGES = (in_place, pythons_numbers, running_mean, unmarked_mean, replaced, normed)


class Normed(Layer):
    """Has two layers more, whose buffers a forward may change."""

    def __init__(self, change: Change | None) -> None:
        super().__init__(change)
        self.norm = nn.BatchNorm1d(8)
        self.bounded = spectral_norm(nn.Linear(8, 8))


def run(change: Change, schedule: Schedule) -> Any:
    """Losses, and all that the layers hold in the end."""
    torch.manual_seed(0)
    elsewhere = None if change is in_place else change
    model = nn.Sequential(*map(Normed, (change, elsewhere, elsewhere, elsewhere)))
    pipeline = flat_pipeline(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.05),
        schedule=schedule,
        clip_grad_norm=0.01,
        post_validation=True,
    )
    random.seed(1)
    generator = torch.Generator().manual_seed(2)
    losses = [
        pipeline.step(*torch.randn(2, 12, 8, generator=generator)).loss
        for _ in range(4)
    ]
    pipeline.close()
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    return losses, {name: value.detach().clone() for name, value in held.items()}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_forward_changes_is_changed_once(change: Change) -> None:
    schedule = plan("ZBH1", n_stages=2, n_microbatches=6)
    losses, held = run(change, schedule)
    found = run(change, replace(schedule, recompute=(True, True)))
    assert found[0] == losses
    assert_same(found[1], held)


def test_a_layer_that_begins_to_change_its_input_is_refused() -> None:
    n_runs = 0

    def later(layer: Any, x: Tensor) -> Tensor:
        nonlocal n_runs
        n_runs += 1
        return x if x.requires_grad or n_runs < 12 else in_place(layer, x)

    with pytest.raises(RuntimeError, match="has changed its input in place"):
        run(later, again("1F1B", 2))


@contextmanager
def allocated() -> Iterator[list[int]]:
    """Net bytes that the allocator gives out within this."""
    found: list[int] = []
    with torch.profiler.profile(profile_memory=True) as profile:
        yield found
    found.append(sum(one.self_cpu_memory_usage for one in profile.events()))


def stage_of(layers: list[nn.Module], recompute: tuple[int, ...]) -> Stage:
    stage = Stage(
        [Chunk(0, 0, tuple(layers))],
        n_chunks=2,
        loss_fn=nn.functional.mse_loss,
        device=torch.device("cpu"),
        recompute=recompute,
    )
    x = torch.randn(64, 16, 16)
    stage.begin(step=0, inputs=[(x,)] * 3, targets=None, n_microbatches=3)
    return stage


def left_by_f(recompute: tuple[int, ...]) -> tuple[int, int]:
    """Bytes that F leaves, and B in its place."""
    stage = stage_of(build(range(1, 5)), recompute)
    gradient = (torch.randn(64, 16, 16),)
    for microbatch in range(2):  # the first one learns
        with allocated() as after_f:
            y = stage.forward(0, microbatch, None)
        del y
        stage.backward_input(0, microbatch, gradient)
        held = stage._saved[0, microbatch].graph.held_bytes()
        stage.backward_weight(0, microbatch)
    return after_f[0], held


def test_f_leaves_the_input_of_a_recomputed_layer_and_w_what_it_ever_did() -> None:
    all_kept, for_w = left_by_f(())
    boundary = 64 * 16 * 16 * 4
    assert all_kept > 16 * boundary
    kept, held = left_by_f((0, 1, 2, 3))
    assert kept <= 4.3 * boundary  # outputs of three layers, and F's own result
    assert held == for_w
    some, held = left_by_f((1, 2))
    assert kept < some < all_kept
    assert held == for_w


def test_a_schedule_that_names_a_layer_the_chunk_lacks_is_refused() -> None:
    schedule = again("ZBH1", 3, (0, 7))
    assert "layer 7 of a chunk of 3 layers" in refusal(train, schedule, None)
    split = (3, 3, N_LAYERS - 6)
    assert "layer 7 of chunk 0" in refusal(recomputed_layers, schedule, split)
    schedule = again("ZBH1", 3, (0, 2))
    assert recomputed_layers(schedule, split) == {0, 2, *range(3, N_LAYERS)}


@pytest.mark.slow
def test_a_pipeline_chooses_what_it_recomputes() -> None:
    costs = {"costs": Costs(m_r=0.05, memory_limit=1.2)}
    plain = train("ZBH1", 2)
    for recompute, expected in {
        "all": (True, True),
        "none": None,
        (1, 2, 8): ((1, 2), (3,)),
    }.items():
        pipeline = make_pipeline("ZBH1", 2, recompute=recompute)
        assert pipeline.schedule.recompute == expected
        pipeline.close()
    pipeline = make_pipeline("ZBH1", 2, recompute="auto", **costs)
    assert pipeline.schedule.recomputing
    pipeline.close()
    found = train("ZBH1", 2, recompute="auto", **costs)
    assert found[:2] == plain[:2]
    assert_same(found[2], plain[2])


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"recompute": "auto", "costs": Costs(m_r=0.1)}, "needs a memory limit"),
        ({"recompute": [9]}, "layer 9 shall be recomputed; the layers are 0 to 8"),
    ],
)
def test_a_pipeline_refuses_what_it_cannot_recompute(
    more: dict[str, Any], text: str
) -> None:
    assert text in refusal(make_pipeline, "ZBH1", 2, **more)


def test_a_switch_brings_the_recompute_of_its_schedule() -> None:
    schedule = plan("ZBH1", n_stages=2, n_microbatches=6)
    plain = train(schedule, None)
    pipeline = make_pipeline(schedule, None)
    losses = []
    for step in range(3):
        losses.append(pipeline.step(*batch(step)).loss)
        pipeline.switch(replace(schedule, recompute=(step == 0, True)))
        on_first = pipeline.stages.executors[0].stage._recomputed
        assert bool(on_first) == (step == 0)
    assert losses == [loss for loss, _ in plain[0]]
    assert_same(dict(pipeline.named_parameters()), plain[2])
    pipeline.close()
