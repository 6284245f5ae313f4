"""Random numbers belong to the caller; layers draw the same in every run of a job."""

import hashlib
import importlib
import random
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import dropout, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import zbpp

M = 4


class Noise(nn.Module):
    """A Linear, and numbers from a generator, from some step on."""

    def __init__(self, generator: str | None, since: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.generator, self.since, self.n = generator, since, 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        x = self.linear(x)
        if self.generator is None or self.n <= self.since * M:
            return x
        if self.generator == "torch":
            return dropout(x, 0.3)
        module = "numpy.random" if self.generator == "numpy" else "random"
        return x * (0.5 + importlib.import_module(module).random())


def states() -> tuple[Any, ...]:
    numpys = importlib.import_module("numpy.random").get_state()
    parts = torch.get_rng_state().tolist(), random.getstate(), numpys[1].tolist()
    return *parts, numpys[2:]


def pipeline_of(
    generators: tuple[str | None, ...], schedule: str = "1F1B", **more: Any
) -> zbpp.Pipeline:
    torch.manual_seed(0)
    layers = [Noise(name, more.get("since", 0)) for name in generators]
    more.pop("since", None)
    settings = {"n_stages": 2, "n_microbatches": M, "clip_grad_norm": 0.05}
    return flat_pipeline(
        layers,
        schedule=schedule,
        loss_fn=mse_loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.02),
        **(settings | more),
    )


DRAWING = "torch", "python", "numpy", None


@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1", "ZBV"])
@pytest.mark.parametrize("more", [{}, {"seed": 1}, {"recompute": "all"}, {"since": 2}])
def test_steps_leave_the_generators_as_they_were(
    schedule: str, more: dict[str, Any]
) -> None:
    before = states()
    pipeline = pipeline_of(DRAWING, schedule, **more)
    importlib.import_module("numpy.random").standard_normal()  # a second one is kept
    inputs = torch.randn(8, 8)
    for step in range(4):
        before = states()
        pipeline.step(inputs, inputs)
        assert states() == before, step
        pipeline.evaluate(inputs, inputs)
        pipeline.predict(inputs)
        assert states() == before, step
    pipeline.forward_backward(inputs, inputs, n_calls=1)
    pipeline.optim_step()
    pipeline.close()
    assert states() == before


def outcome(
    schedule: str, n_stages: int | None, **more: Any
) -> tuple[list[float], list[float], str]:
    """Losses, norms, and a hash of this process's parameters."""
    pipeline = pipeline_of(DRAWING, schedule, n_stages=n_stages, **more)
    batch = torch.randn(8, 8)
    results = [pipeline.step(batch, batch) for _ in range(5)]
    losses = [r.loss for r in results]
    pipeline.synchronize()
    digest = hashlib.sha256()
    parameters = dict(pipeline.named_parameters())
    for part in pipeline.gather({k: p.detach() for k, p in parameters.items()}):
        parameters |= part
    for name in sorted(parameters):
        digest.update(parameters[name].detach().numpy().tobytes())
    pipeline.close()
    return losses, [r.grad_norm for r in results], digest.hexdigest()


WAYS: list[tuple[str, int, dict[str, Any]]] = [
    ("1F1B", 2, {}),
    ("ZBH1", 2, {}),
    ("ZBV", 2, {}),
    ("ZBH1", 4, {}),
    ("ZBH1", 2, {"post_validation": True}),  # every step is rolled back and replayed
    ("1F1B", 2, {"recompute": "all"}),
    ("ZBV", 2, {"recompute": "all", "post_validation": True}),
]


@pytest.mark.parametrize("seed", [None, 7])
def test_draws_are_those_of_one_stage_under_every_mode(seed: int | None) -> None:
    expected = outcome("1F1B", 1, seed=seed)
    for schedule, n_stages, more in WAYS:
        assert outcome(schedule, n_stages, seed=seed, **more) == expected, schedule


@pytest.mark.dist
def test_draws_are_the_same_in_processes(pool: Pool) -> None:
    expected = outcome("1F1B", 1)
    for schedule in ("ZBH1", "ZBV"):
        assert pool.run(outcome, 2, schedule, None) == [expected] * 2
    assert outcome("1F1B", 1, seed=3) != expected


def test_draws_follow_the_callers_generator_and_each_step() -> None:
    def losses(seed: int) -> list[float]:
        model = [Noise("torch"), Noise(None)]
        for p in nn.ModuleList(model).parameters():
            nn.init.constant_(p, 0.1)
        torch.manual_seed(seed)
        settings: Any = {"loss_fn": mse_loss, "n_stages": 2, "n_microbatches": M}
        pipeline = zbpp.Pipeline(
            model, "1F1B", optimizer=lambda p: torch.optim.SGD(p, lr=0.0), **settings
        )
        return [pipeline.step(torch.ones(8, 8), torch.ones(8, 8)).loss for _ in "123"]

    assert losses(0) == losses(0) != losses(1)
    assert len(set(losses(0))) == 3


def test_a_layer_that_draws_late_draws_other_numbers_in_every_step() -> None:
    pipeline = pipeline_of(("python", None), since=2)
    batch = torch.ones(8, 8)
    pipeline.optimizers[0].param_groups[0]["lr"] = 0.0
    pipeline.optimizers[1].param_groups[0]["lr"] = 0.0
    for group in (g for o in pipeline.optimizers for g in o.param_groups):
        group["weight_decay"] = 0.0
    losses = [pipeline.step(batch, batch).loss for _ in range(6)]
    assert losses[0] == losses[1] and len(set(losses[1:])) == 5


def replicas_draw() -> list[float]:
    mesh = zbpp.mesh(stages=1, data_parallel=2)
    pipeline = pipeline_of(("torch", None), mesh=mesh, n_stages=None)
    batch = torch.ones(8, 8)
    result = pipeline.step(batch, batch, return_outputs=True)
    pipeline.close()
    return result.outputs.flatten().tolist()


@pytest.mark.dist
def test_replicas_draw_other_numbers(pool: Pool) -> None:
    first, second = pool.run(replicas_draw, 2)
    assert first != second


def shuffled(
    schedule: str, rate: float, seed: int | None, n_stages: int | None = None
) -> float:
    """The last loss of some epochs of the plainest loader there is."""
    torch.manual_seed(0)
    data = torch.randn(128, 8)
    layers = [
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)),
        *(nn.Linear(8, 8) for _ in range(3)),
    ]
    pipeline = zbpp.Pipeline(
        layers,
        schedule,
        loss_fn=mse_loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        n_stages=n_stages,
        n_microbatches=M,
        numerics=zbpp.Numerics(seed=seed),
    )
    loader = DataLoader(TensorDataset(data, data), 16, shuffle=True)
    for _ in range(4):
        for inputs, targets in loader:
            loss = pipeline.step(inputs, targets).loss
    pipeline.close()
    return loss


def shuffled_in_turn(rows: list[tuple[str, float, int | None]]) -> list[float]:
    return [shuffled(*row) for row in rows]


@pytest.mark.dist
@pytest.mark.parametrize("n", [2, 4])
def test_a_shuffled_loader_reads_alike_on_all_ranks(n: int, pool: Pool) -> None:
    rows = [("ZBH1", 0.1, None), ("ZBH1", 0.0, 1), ("1F1B", 0.1, 1), ("ZBV", 0.1, None)]
    if n == 4:
        rows.pop()  # there are as many chunks as layers
    expected = [shuffled(*row, n_stages=2) for row in rows]
    assert pool.run(shuffled_in_turn, n, rows) == [expected] * n


def test_a_seed_changes_no_data() -> None:
    assert shuffled("1F1B", 0.0, None, 1) == shuffled("ZBH1", 0.0, 5, 2)
