"""Passes recorded once and replayed give the bits of passes that run as ever.

Graphs of a GPU are played on the CPU, by `tape`.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from small_model import batch, build, make_pipeline
from tape import TapePool
from torch import Tensor, nn

from zbpp import diagnostics
from zbpp.core import RequestError
from zbpp.pipeline import Pipeline
from zbpp.runtime.graphed.slot import Totals
from zbpp.runtime.graphed.stage import GraphedStage


@pytest.fixture(autouse=True)
def _plays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbpp.runtime.driver.build.pools_on", lambda device: TapePool)


def stages(pipeline: Pipeline) -> list[GraphedStage]:
    found = [executor.stage for executor in pipeline.stages.executors.values()]
    return [one for one in found if isinstance(one, GraphedStage)]


Found = tuple[list[Any], list[Tensor], Pipeline, list[int]]


def trained(mode: str, steps: int = 5, **more: Any) -> Found:
    pipeline = make_pipeline(mode, 2, **{"clip_grad_norm": 0.5, **more})
    losses = [pipeline.step(*batch(i)) for i in range(steps)]
    pipeline.synchronize()
    values = [(x.loss, x.grad_norm) for x in losses]
    values.append(pipeline.evaluate(*batch(99, samples=7), n_microbatches=3))
    rollbacks = [x.rollbacks for x in losses]
    bits = [p.detach().clone() for _, p in pipeline.named_parameters()]
    return values, bits, pipeline, rollbacks


def same(one: Found, other: Found) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize("mode", ["FThenB", "1F1B", "VPP", "ZBV"])
def test_replays_have_the_bits_of_passes(mode: str) -> None:
    found = trained(mode, cuda_graphs=True)
    assert same(found, trained(mode))
    most = {"1F1B": [2, 1], "FThenB": [6, 6]}.get(mode)
    slots = [n for stage in stages(found[2]) for n in stage.n_slots.values()]
    assert slots == most or (most is None and all(slots))
    assert not any(diagnostics.graph_report(found[2]).values())


@pytest.mark.parametrize("exact", [True, False])
def test_so_they_do_through_rollbacks(exact: bool) -> None:
    """Clipped so that steps are rolled back, and forwards of the next one run again."""
    how: dict[str, Any] = {"clip_grad_norm": 0.3, "exact_sums": exact, "steps": 6}
    how["post_validation"] = True
    found, expected = trained("ZBV", cuda_graphs=True, **how), trained("ZBV", **how)
    assert (
        same(found, expected)
        if exact
        else found[0][-1] == pytest.approx(expected[0][-1], rel=1e-5)
    )
    assert all(n for stage in stages(found[2]) for n in stage.n_slots.values())
    assert sum(found[3]) > 0


def test_a_sum_that_takes_other_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Totals, "settle", lambda self, ps: [p.grad for p in ps])
    with pytest.raises(RuntimeError, match="train without cuda_graphs"):
        trained("ZBH1", cuda_graphs=True)


class Draws(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.1)


class Hooked(nn.Linear):
    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        self.register_forward_hook(lambda *_: None)


class Normed(nn.Module):
    def __init__(self, *size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.linear = nn.Linear(*size)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x))
        return y


class Waits(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * float(y.detach().abs().max().item() > 0)


def with_layer(make: Callable[[int, int], nn.Module]) -> Pipeline:
    torch.manual_seed(3)
    layers = build(range(9))
    layers[7] = make(16, 16)
    return make_pipeline("ZBH1", 2, model=layers, n_layers=None, cuda_graphs=True)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Draws, "it draws random numbers"),
        (Hooked, "a Hooked has hooks"),
        (Normed, "it changes buffers"),
    ],
)
def test_chunks_that_do_more_run_as_ever(make: Any, why: str) -> None:
    pipeline = with_layer(make)
    for i in range(4):
        pipeline.step(*batch(i))
    assert diagnostics.graph_report(pipeline) == {0: "", 1: why}
    assert stages(pipeline)[1].n_slots == {1: 0}


def test_a_layer_that_waits_for_the_device_ends_the_run() -> None:
    pipeline = with_layer(Waits)
    pipeline.step(*batch(0))
    pipeline.step(*batch(1))
    with pytest.raises(RuntimeError, match="cannot wait") as caught:
        pipeline.step(*batch(2))
    assert "cuda_graphs" in "".join(caught.value.__notes__)


def test_other_shapes_run_as_ever_and_other_memory_is_recorded_anew() -> None:
    def run(*, cuda_graphs: bool) -> tuple[list[float], Pipeline]:
        pipeline = make_pipeline("ZBH1", 2, cuda_graphs=cuda_graphs)
        losses = [pipeline.step(*batch(i)).loss for i in range(3)]
        losses.append(pipeline.step(*batch(3, samples=6)).loss)
        pipeline.synchronize()
        for _, p in pipeline.named_parameters():
            p.data = p.data.clone()
        losses += [pipeline.step(*batch(i)).loss for i in range(4, 6)]
        uneven = [list(x.split([3, 1, 2, 2, 2, 2])) for x in batch(6)]
        losses.append(pipeline.step(*uneven).loss)  # graphs add to what others left
        losses.append(pipeline.step(*batch(7)).loss)
        return losses, pipeline

    losses, pipeline = run(cuda_graphs=True)
    assert losses == run(cuda_graphs=False)[0]
    assert [g.n_recorded for s in stages(pipeline) for g in s._graphs.values()] == [
        2,
        2,
    ]


def refusal() -> str:
    with pytest.raises(RequestError) as error:
        make_pipeline("ZBV", None, cuda_graphs=True)
    return str(error.value)


@pytest.mark.dist
def test_several_processes_are_refused(pool: Pool) -> None:
    for text in pool.run(refusal, 2):
        assert text.startswith("cuda_graphs is for a pipeline in one process")
