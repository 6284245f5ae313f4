"""Bytes of layers and of stages, against sums done by hand."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import zbpp
from zbpp.core import LayerCosts, Placement, RequestError, write_schedule
from zbpp.memory import StageEstimate, estimate, layer_memory
from zbpp.planning import PlanRequest, make_plan
from zbpp.simulator import peak_memory, simulate

N, D = 32, 16
SIZE = N * D * 4  # bytes of an activation
WEIGHT = D * D * 4


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def block(width: int = D) -> nn.Module:
    """Linear keeps its input, Tanh its output, which the next layer reads."""
    return nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh())


def batch(width: int = D) -> tuple[Tensor, Tensor]:
    return torch.empty(N, width), torch.empty(N, width)


def test_the_columns_of_blocks_equal_sums_by_hand() -> None:
    costs = layer_memory([block() for _ in range(6)], batch(), mse_loss, optimizer=sgd)
    assert costs.n_layers == 6
    # The batch is the caller's; the other inputs belong to the layers.
    assert costs.of("m_b")[:-1] == (0, SIZE, SIZE, SIZE, SIZE)
    assert costs.of("m_w")[1:-1] == (2 * SIZE,) * 4  # x and dy
    # parameters, gradients, and the copy for a rollback; SGD has no state
    assert costs.of("m_fixed") == (3 * WEIGHT,) * 6
    assert costs.of("message") == (SIZE,) * 5
    # the loss needs its differences and a copy of their squares
    assert costs.of("peak_f") == (2 * SIZE, *(3 * SIZE,) * 4, 4 * SIZE)
    assert costs.of("peak_w")[1:-1] == (WEIGHT,) * 4
    assert costs.of("m_r")[1:-1] == (SIZE,) * 4


@pytest.mark.parametrize("mode", ["1F1B", "VPP", "ZBV"])
def test_planner_and_estimate_give_one_answer(mode: str, tmp_path: Path) -> None:
    layers = [block() for _ in range(8)]
    costs = layer_memory(layers, batch(), mse_loss, optimizer=sgd)
    request = PlanRequest(
        schedule=mode, n_stages=2, n_microbatches=4, costs=costs, split="even"
    )
    plan = make_plan(request)
    path = str(tmp_path / "schedule.json")
    write_schedule(plan.schedule, path)
    found = estimate(
        layers, batch(), mse_loss, n_stages=2, n_microbatches=4, modes=[path],
        optimizer=sgd, post_validation=True,
    )  # fmt: skip
    assert plan.peak == found.peak(path)
    exact = replace(request, memory_limit=plan.peak)
    assert make_plan(exact).peak == plan.peak
    with pytest.raises(RequestError, match="limit"):  # messages and batch do not fit
        least = found.modes[path][0]
        without = plan.peak - least.messages - least.other
        make_plan(replace(request, memory_limit=without))


def test_repeated_estimates_are_equal() -> None:
    """Storages of other sizes come where those of before were."""
    widths = (1, 4, 1, 2)
    layers = [
        nn.Sequential(nn.Linear(D, D * n), nn.GELU(), nn.Linear(D * n, D))
        for n in widths
    ]
    costs = [layer_memory(layers, batch(), mse_loss, optimizer=sgd) for _ in range(8)]
    # W reads x and dy of both products; of these the input of layer 0 is the batch
    ends = [(2 * n + 2) * SIZE for n in widths[1:-1]]
    assert costs[0].of("m_w")[1:-1] == tuple(ends)
    assert costs == [costs[0]] * 8


@pytest.mark.parametrize(
    ("settings", "n_weights", "more"),
    [
        ({"optimizer": sgd, "post_validation": False}, 2, 0),
        ({"optimizer": sgd}, 3, 0),
        ({}, 5, 4),  # AdamW has two moments, and counts its steps
        ({"optimizer": None, "post_validation": False}, 2, 0),
    ],
)
def test_an_optimizer_and_its_rollback_count(
    settings: dict[str, Any], n_weights: int, more: int
) -> None:
    costs = layer_memory([block(), block()], batch(), mse_loss, **settings)
    assert costs.of("m_fixed") == (n_weights * WEIGHT + more,) * 2


def test_the_largest_of_several_optimizers_counts() -> None:
    def large_first(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(parameters[:1]), sgd(parameters[1:])]

    makes = (large_first, lambda parameters: large_first(parameters)[::-1])
    first, last = (
        layer_memory([nn.Linear(D, D)], batch(), mse_loss, optimizer=make).of("peak_o")
        for make in makes
    )
    assert first == last > (WEIGHT,)


@pytest.mark.parametrize(("samples", "most"), [(4096, 1), (1, 4)])
def test_a_step_is_traced_where_it_may_be_the_peak(samples: int, most: int) -> None:
    """Else each kind of layer has its step traced, which takes much less time."""
    sizes = []

    def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        sizes.append(len(parameters))
        return torch.optim.AdamW(parameters)

    x, layers = torch.empty(samples, D), [block() for _ in range(8)]
    estimate(
        layers, (x, x), mse_loss,
        n_stages=2, n_microbatches=4, modes=["1F1B", "ZBH1"], optimizer=adamw,
    )  # fmt: skip
    assert max(sizes) == most


def test_a_builder_allocates_nothing_and_any_size_of_micro_batches_is_traced() -> None:
    wide = 2**22

    def build(indices: range) -> list[nn.Module]:
        return [nn.Linear(wide, wide, bias=False) for _ in indices]  # 64 TiB each

    x = torch.empty(1, wide)
    model = zbpp.layers_from(build, n_layers=100)
    costs = layer_memory(model, (x, x), mse_loss, microbatch_size=3)
    assert costs.of("m_b")[50] == 3 * 4 * wide
    placement = Placement((0, 1))
    chunks = costs.on(placement, [50, 50], n_microbatches=4)
    assert chunks.on(placement).fixed[0] > 250 * 2**46


def test_an_estimate_leaves_the_model_unchanged() -> None:
    layers = nn.Sequential(block(), block())
    before = {name: p.clone() for name, p in layers.named_parameters()}
    layer_memory(layers, batch(), mse_loss)
    for name, p in layers.named_parameters():
        assert type(p) is nn.Parameter and p.grad is None
        assert torch.equal(p, before[name])


class Choosy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].sum() + x


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (
            lambda: layer_memory([block(), Choosy()], batch(), mse_loss),
            r"layer 1 \(a Choosy\).*aten.nonzero",
        ),
        (
            lambda: layer_memory([block()], batch(), mse_loss, device="xpu"),
            r"finds no xpu device.*--device cpu",
        ),
        (
            lambda: estimate(
                [block()], batch(), mse_loss,
                n_stages=1, n_microbatches=1, shard="parameters",
            ),
            "needs replicas to shard among",
        ),
    ],
)  # fmt: skip
def test_models_that_cannot_be_estimated_are_refused(
    act: Callable[[], object], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        act()


def with_ends(*, tied: bool) -> list[nn.Module]:
    blocks = [nn.Linear(D, D) for _ in range(6)]
    embedding, head = nn.Embedding(512, D), nn.Linear(D, 512, bias=False)
    if tied:
        head.weight = embedding.weight
    return [embedding, *blocks, head]


def stages_of(mode: str, n_stages: int, *, tied: bool) -> list[StageEstimate]:
    tokens = torch.zeros(2, dtype=torch.long)
    found = estimate(
        with_ends(tied=tied), (tokens, tokens), nn.functional.cross_entropy,
        n_stages=n_stages, n_microbatches=4, modes=[mode], optimizer=sgd,
        post_validation=False,
    )  # fmt: skip
    return list(found.modes[mode])


def test_a_tied_weight_counts_on_each_of_its_stages() -> None:
    size = 512 * D * 4
    tied, untied = (stages_of("1F1B", 4, tied=tied) for tied in (True, False))
    for stage in (0, 3):
        assert tied[stage].parameters == untied[stage].parameters
        assert tied[stage].peak - untied[stage].peak >= size
    assert tied[1:3] == untied[1:3]
    both, other = stages_of("ZBV", 2, tied=True)  # both ends are on the first stage
    apart, same = stages_of("ZBV", 2, tied=False)
    assert apart.parameters - both.parameters == size
    assert apart.gradients == both.gradients, "each end has one"
    assert other == same


def test_plans_count_received_gradients_of_ties() -> None:
    size = 512 * D * 4
    tokens = torch.zeros(8, dtype=torch.long)
    tied, untied = (
        zbpp.plan_model(
            with_ends(tied=tied), "1F1B", n_stages=2, n_microbatches=4,
            loss_fn=nn.functional.cross_entropy, optimizer=sgd,
            example=(tokens, tokens), step=zbpp.StepPolicy(post_validation=False),
        ).costs
        for tied in (True, False)
    )  # fmt: skip
    assert (tied.peak_o, untied.peak_o) == ((size, size), (0.0, 0.0))


def test_a_plan_of_layers_has_the_memory_of_the_estimate() -> None:
    tokens = torch.zeros(2, dtype=torch.long)
    costs = layer_memory(
        with_ends(tied=True), (tokens, tokens), nn.functional.cross_entropy,
        optimizer=sgd, post_validation=False,
    )  # fmt: skip
    sizes = {"n_stages": 4, "n_microbatches": 4}

    def peaks(costs: LayerCosts) -> list[float]:
        request = PlanRequest(schedule="1F1B", costs=costs, split="even", **sizes)
        plan = zbpp.make_plan(request)
        return peak_memory(simulate(plan), plan.costs)

    estimated = [stage.peak for stage in stages_of("1F1B", 4, tied=True)]
    for planned, true in zip(peaks(costs), estimated, strict=True):
        assert 0.95 * true - 2048 <= planned <= 1.5 * true + 2048
    forgotten = peaks(replace(costs, tied=()))
    assert forgotten[-1] < 0.6 * estimated[-1]  # the control


@pytest.mark.slow
def test_a_file_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    path, x = tmp_path / "plan.json", torch.zeros(8, 64)
    found = {}
    for mode in ("FThenB", "1F1B"):
        schedule = zbpp.plan(mode, n_stages=2, n_microbatches=8)
        write_schedule(schedule, path)
        found[mode] = estimate(
            [nn.Linear(64, 64) for _ in range(4)], (x, x), mse_loss,
            modes=[str(path)], n_stages=2, n_microbatches=8,
        ).modes[str(path)]  # fmt: skip
    assert found["FThenB"][0].peak > found["1F1B"][0].peak


WIDTH, N_LAYERS = 128, 4
N_PARAMETERS = WIDTH * WIDTH + WIDTH  # of a layer
SHARDS = ("none", "optimizer", "gradients", "parameters")


def replicated(shard: Any, mode: str = "ZBV", n: int = 64) -> list[StageEstimate]:
    x = torch.zeros(4, WIDTH)
    found = estimate(
        [nn.Linear(WIDTH, WIDTH) for _ in range(N_LAYERS)], (x, x), mse_loss,
        n_stages=2, n_microbatches=4, modes=[mode], data_parallel=n, shard=shard,
    )  # fmt: skip
    return list(found.modes[mode])


def test_sharded_replicas_use_the_memory_of_zero() -> None:
    """AdamW in 32 bits keeps 4 + 4 + 8 bytes a parameter; replicas a part of it."""
    stages = {shard: replicated(shard) for shard in SHARDS}
    for shard, both in stages.items():
        for stage in both:
            kept = stage.parameters + stage.gradients + stage.optimizer
            n = N_PARAMETERS * N_LAYERS // 2
            share = 16 * n / (1 if shard == "none" else 64)
            assert kept == pytest.approx(share, rel=1e-2)
    peaks = [max(stage.peak for stage in stages[shard]) for shard in SHARDS]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4
    layer, stage = 4 * N_PARAMETERS, 4 * N_PARAMETERS * N_LAYERS // 2
    assert peaks[1] > 2 * stage  # whole parameters and whole gradients
    batch = 4 * 4 * WIDTH * 4  # of stage 0, which has the last chunk too: twice
    whole = {shard: both[0].other - 2 * batch for shard, both in stages.items()}
    assert whole["none"] == whole["optimizer"] == 0
    assert whole["gradients"] == pytest.approx(stage / 2 * 63 / 64, abs=1)
    assert whole["parameters"] - whole["gradients"] == pytest.approx(layer, abs=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_optimizer_needs_no_memory_of_the_device(
    dtype: torch.dtype,
) -> None:
    layers = [nn.Linear(16, 16, dtype=dtype) for _ in range(4)]
    x = torch.zeros(4, 16, dtype=dtype)
    how: dict[str, Any] = {"n_stages": 2, "n_microbatches": 4, "modes": ["ZBV"]}
    here, there = (
        estimate(layers, (x, x), mse_loss, offload_optimizer=x_there, **how).modes[
            "ZBV"
        ]
        for x_there in (False, True)
    )
    n = 2 * 17 * 16  # numbers of a stage
    for on_device, on_host in zip(here, there, strict=True):
        assert on_host.optimizer == on_host.rollback == on_device.host == 0
        saved = on_device.optimizer + on_device.rollback
        assert on_device.peak - on_host.peak >= saved >= 3 * dtype.itemsize * n
        # masters, gradients, two moments and the copy for a rollback
        assert on_host.host >= 5 * 4 * n


def test_residuals_need_the_memory_of_two_more_gradients() -> None:
    x = torch.randn(4, 32)
    how = {"n_stages": 2, "n_microbatches": 4, "modes": ["ZBH1"], "data_parallel": 2}
    layers = [nn.Linear(32, 32) for _ in range(4)]
    without, found = (
        estimate(layers, (x, x), mse_loss, residuals=residuals, **how).modes["ZBH1"]
        for residuals in (False, True)
    )
    for before, after in zip(without, found, strict=True):
        assert before.gradients == 2 * 4 * (32 * 32 + 32)
        assert after.gradients == 3 * before.gradients
        assert after.peak - before.peak == 2 * before.gradients
