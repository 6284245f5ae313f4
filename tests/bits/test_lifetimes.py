"""How long a pipeline keeps what its passes have made, and the times of its jobs.

A tensor that a layer saves for its backward is looked for by a weak reference.
"""

import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, make
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zbpp
from zbpp import diagnostics

M = 4
VECTORS = Case(model="vectors")


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Layer") -> Tensor:
        saved = torch.zeros(3)
        ctx.save_for_backward(saved)
        ctx.layer = layer
        layer.saved.append(weakref.ref(saved))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.layer.alive.append(ctx.layer.n_saved())
        return dy.clone(), None


class Layer(nn.Module):
    """Counts the forwards whose tensors are there when each of its backwards runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.saved: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []
        self.outputs: list[weakref.ref[Tensor]] = []
        self.inputs: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(weakref.ref(x.untyped_storage()))
        result: Tensor = _Saves.apply(self.linear(x), self)
        self.outputs.append(weakref.ref(result))
        return result

    def n_saved(self) -> int:
        return sum(ref() is not None for ref in self.saved)


def trained(layers: list[Layer], mode: str, recompute: Any = None) -> zbpp.Pipeline:
    """A pipeline of two stages after two steps."""
    settings: dict[str, Any] = {"n_stages": 2, "n_microbatches": M, "loss_fn": mse_loss}
    plan = zbpp.plan_model(layers, mode, recompute=recompute, **settings)
    pipeline = zbpp.Pipeline(layers, plan, optimizer=None, **settings)
    for step in range(2):
        pipeline.step(*VECTORS.batch(step))
    return pipeline


def layers_of(mode: str, recompute: Any = None) -> list[Layer]:
    """Layers after two steps of two stages."""
    layers = [Layer() for _ in range(4)]
    trained(layers, mode, recompute).close()
    return layers


@pytest.mark.parametrize(
    ("mode", "recompute", "expected"),
    [
        ("FThenB", None, [4, 4, 4, 4]),
        ("1F1B", None, [2, 2, 1, 1]),
        ("1F1B", "all", [0, 0, 0, 0]),
        ("FThenB", (1, 2), [4, 0, 0, 4]),
    ],
)
def test_saved_tensors_live_from_f_to_b_except_in_recomputed_layers(
    mode: str, recompute: Any, expected: list[int]
) -> None:
    layers = layers_of(mode, recompute)
    assert [max(layer.alive) for layer in layers] == expected
    assert not any(layer.n_saved() for layer in layers), "nothing outlives a step"


def test_outputs_are_freed_once_they_are_sent() -> None:
    for mode in ("1F1B", "ZBV"):
        for layer in layers_of(mode):
            assert len(layer.outputs) == 2 * M
            assert not any(ref() is not None for ref in layer.outputs)


@pytest.mark.parametrize("recompute", [None, "all"])
def test_inputs_are_let_go_with_their_step(recompute: Any) -> None:
    """While the pipeline lives; the batch is the caller's."""
    layers = [Layer() for _ in range(4)]
    pipeline = trained(layers, "1F1B", recompute)
    for layer in layers[1:]:
        assert len(layer.inputs) == 2 * M * (1 if recompute is None else 2)
        assert not any(ref() is not None for ref in layer.inputs)
    pipeline.close()


# ---- Times of jobs.


def test_a_timeline_has_the_jobs_of_the_last_steps() -> None:
    pipeline = make(VECTORS)
    pipeline.step(*VECTORS.batch(0))
    start_s = time.perf_counter()
    pipeline.step(*VECTORS.batch(1))
    found = diagnostics.timeline(pipeline)
    for row, order in zip(found.rows, pipeline.schedule.orders, strict=True):
        assert [str(slot.job) for slot in row] == [str(job) for job in order]
        assert min(slot.start for slot in row) > start_s
    pipeline.evaluate(*VECTORS.batch(2))
    assert diagnostics.timeline(pipeline) == found, "an evaluation leaves none"


def test_a_profile_names_the_jobs() -> None:
    """The control: what runs outside of jobs is in no range of theirs."""
    pipeline = make(VECTORS)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    jobs = {str(job) for order in pipeline.schedule.orders for job in order}
    with torch.profiler.profile(activities=cpu) as profile:
        pipeline.step(*VECTORS.batch(0))
    assert jobs - {"V"} <= {event.name for event in profile.events()}
    with torch.profiler.profile(activities=cpu) as profile:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert not jobs & {event.name for event in profile.events()}


def ranks_of_timeline() -> list[int]:
    with make(VECTORS) as pipeline:
        pipeline.step(*VECTORS.batch(0))
        return [len(row) for row in diagnostics.timeline(pipeline).rows]


@pytest.mark.dist
def test_a_timeline_has_all_stages_on_each_rank(pool: Pool) -> None:
    assert not dist.is_initialized()
    expected = ranks_of_timeline()
    assert pool.run(ranks_of_timeline, 2) == [expected] * 2
