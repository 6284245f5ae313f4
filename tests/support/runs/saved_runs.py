"""Runs that save and go on elsewhere: random numbers, buffers, ties, schedulers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zbpp
from zbpp.checkpoint import load

N_LAYERS, WIDTH, M, CLIP, STEPS, SAVED_AFTER = 8, 8, 4, 5.0, 6, 3
EXTRA = {"position": [3, 0.1], "name": "a"}


class Place(NamedTuple):
    """Where a part of a run trains; ``apart``: each stage is a process."""

    mode: str
    stages: int
    apart: bool = False
    replicas: int = 1
    shard: str = "none"
    split: tuple[int, ...] | None = None

    @property
    def n_ranks(self) -> int:
        return self.stages * self.replicas if self.apart else 1


class Layer(nn.Module):
    """Draws random numbers, and changes buffers, one of which is not saved."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drops = drops
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.drops and self.training:
            self.mean.lerp_(y.detach().mean(0), 0.1)
            self.seen = self.seen + 1
            y = nn.functional.dropout(y, 0.2)
        return x + y + 0.1 * self.mean


def layers(drops: bool) -> nn.Sequential:
    """The first and the last layer share a weight."""
    torch.manual_seed(0)
    made = nn.Sequential(*(Layer(drops) for _ in range(N_LAYERS)))
    made[-1].linear.weight = made[0].linear.weight
    return made


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "lr": 2e-2},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The first steps are clipped, and the last ones not."""
    x, y = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, (y if step % 2 else 0.2 * y + x)


def make(place: Place, drops: bool) -> tuple[zbpp.Pipeline, list[Any]]:
    settings: dict[str, Any] = {
        "loss_fn": nn.functional.mse_loss,
        "optimizer": two_groups,
        "n_microbatches": M // place.replicas,
    }
    if not place.apart:
        settings["n_stages"] = place.stages
    elif place.replicas > 1:
        mesh = zbpp.mesh(stages=place.stages, data_parallel=place.replicas)
        settings["mesh"] = zbpp.DataParallel(mesh=mesh, shard=place.shard)
    model, schedule = layers(drops), place.mode
    if place.split is not None:
        schedule = zbpp.plan_model(model, schedule, split=place.split, **settings)
    pipeline = zbpp.Pipeline(
        model,
        schedule,
        clip_grad_norm=CLIP,
        numerics=zbpp.Numerics(seed=7),
        step=zbpp.StepPolicy(post_validation=True),
        **settings,
    )
    schedulers = [schedule_of(one) for one in pipeline.optimizers]
    pipeline.attach(*schedulers)
    return pipeline, schedulers


Numbers = list[tuple[float, float | None]]
"""Loss and norm of each step."""


def train(
    place: Place,
    drops: bool,
    folder: str,
    end: int,
    source: str | None = None,
    forget: Callable[[zbpp.Pipeline, list[Any]], object] | None = None,
) -> tuple[Numbers, int]:
    """Take over what ``source`` has, train and save; the numbers and rollbacks."""
    pipeline, schedulers = make(place, drops)
    if source is not None:
        assert pipeline.load(source) == EXTRA
    if forget is not None:
        forget(pipeline, schedulers)
    replica = 0
    if place.replicas > 1:
        replica = torch.distributed.get_rank() % place.replicas
    results = []
    for step in range(pipeline.n_steps, end):
        x, y = (part.chunk(place.replicas)[replica] for part in batch(step))
        results.append(pipeline.step(x, y))
        for one in schedulers:
            one.step()
    pipeline.save(folder, extra=EXTRA, wait=True)
    pipeline.close()
    numbers = [(one.loss, one.grad_norm) for one in results]
    return numbers, sum(one.rollbacks for one in results)


def take_over(folder: Path, drops: bool) -> tuple[nn.Sequential, Any, Any, int]:
    """A plain training that goes on from a checkpoint."""
    model = layers(drops)
    optimizer = two_groups(model.parameters())
    scheduler = schedule_of(optimizer)
    found = load(folder, model, optimizers=[optimizer], schedulers=[scheduler])
    assert found["extra"] == EXTRA
    return model, optimizer, scheduler, found["step"]


def state_in(folder: Path, drops: bool) -> dict[str, Tensor]:
    """All that a plain training needs, by name."""
    model, optimizer, scheduler, step = take_over(folder, drops)
    return state_of(model, optimizer) | {
        "rates": torch.tensor(scheduler.get_last_lr()),
        "step": torch.tensor(step),
    }


def state_of(model: nn.Sequential, optimizer: Any) -> dict[str, Tensor]:
    state = {name: x.detach().clone() for name, x in model.state_dict().items()}
    for name, p in model.named_parameters():
        state |= {f"{name} {key}": x for key, x in optimizer.state[p].items()}
    return state


def train_plainly(folder: Path, source: Path) -> Numbers:
    """A loop of torch goes on; it saves nothing, but its state is compared."""
    model, optimizer, scheduler, first = take_over(source, False)
    numbers: Numbers = []
    for step in range(first, STEPS):
        losses = []
        for x, y in zip(*(part.chunk(M) for part in batch(step)), strict=True):
            loss = nn.functional.mse_loss(model(x), y)
            (loss / M).backward()
            losses.append(loss.item())
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        numbers.append((sum(losses) / M, float(norm)))
    expected = state_in(folder, False)
    for name, value in state_of(model, optimizer).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6)
    return numbers
