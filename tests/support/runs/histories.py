"""Random histories of steps: clean, clipped, Inf and NaN, on random pipelines.

A history is drawn from a seed and run twice, with and without post-validation; both
must leave the same bits, whenever somebody looks.
"""

import math
import random
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from flat import flat_pipeline
from outcomes import Outcome, difference, look
from stock_optimizers import OF_ALL_PARAMETERS, OPTIMIZERS
from torch import Tensor, nn

from zbpp.pipeline import Pipeline
from zbpp.runtime import LossScaler
from zbpp.runtime.testing import small_buckets

N_LAYERS = 8
WIDTH = 8
MODES = ("ZBH1", "ZBH2", "ZBV", "1F1B")
CLIP = 40.0  # far above the norm of a clean step


class Layer(nn.Module):
    """Has a gain, a matmul, dropout, and buffers that every forward changes.

    ``noise`` draws from Python's generator; ``in_place`` changes the input.
    """

    def __init__(
        self, dropout: float, *, noise: bool = False, in_place: bool = False
    ) -> None:
        super().__init__()
        self.noise, self.in_place = noise, in_place
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            x.sub_(0.1)
        y = self.dropout(self.linear(self.norm(x)))
        if self.noise:
            y = y * (1 + 0.2 * random.random())
        self.mean.lerp_(y.detach().float().mean(0), 0.1)
        self.seen = self.seen + 1  # replaced, not changed in place
        return x + torch.tanh(y) * 0.5 + self.mean.to(x.dtype) * 0.01


def build(
    layers: range,
    *,
    dropout: float,
    dtype: torch.dtype,
    noise: bool = False,
    in_place: bool = False,
) -> list[nn.Module]:
    built = []
    for index in layers:
        torch.manual_seed(index)
        layer = Layer(dropout, noise=noise, in_place=in_place and index == 0)
        layer.norm.to(dtype)
        layer.linear.to(dtype)
        built.append(layer)
    return built


def _schedule(kind: str, optimizer: torch.optim.Optimizer) -> Any:
    if kind == "one cycle" and type(optimizer) is torch.optim.AdamW:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)


@dataclass(frozen=True)
class Event:
    """A gradient that is multiplied by ``factor``: of one parameter, in one step."""

    layer: int
    parameter: str
    microbatch: int
    factor: float


SPIKE = Event(2, "linear.weight", 0, 1e5)
INF = Event(5, "norm.weight", 0, math.inf)


@dataclass(frozen=True)
class History:
    """Everything that a run depends on."""

    seed: int
    mode: str
    n_stages: int
    n_microbatches: int
    dtype: torch.dtype
    optimizer: str
    scheduler: str | None
    dropout: float
    loss_scale: bool
    rollback: str
    events: tuple[Event | None, ...]
    looks: tuple[str, ...]
    noise: bool = False
    in_place: bool = False
    freezes: bool = False
    """One parameter is frozen until step 2, another one from step 1 on."""


def draw(seed: int, **fixed: Any) -> History:
    """A history of 3 to 8 steps."""
    rng = random.Random(seed)
    n_steps = rng.randint(3, 8)
    n_microbatches = rng.randint(1, 5)
    values = {
        "seed": seed,
        "mode": rng.choice(MODES),
        "n_stages": rng.randint(1, 4),
        "n_microbatches": n_microbatches,
        "dtype": rng.choice([torch.float32, torch.bfloat16]),
        "optimizer": rng.choice(OF_ALL_PARAMETERS),
        "scheduler": rng.choice([None, "steps", "one cycle"]),
        "dropout": rng.choice([0.0, 0.3]),
        "loss_scale": rng.random() < 0.3,
        "rollback": rng.choice(["deferred", "deferred", "snapshot"]),
        "looks": tuple(
            rng.choice(["", "", "read", "synchronize", "state_dict", "evaluate"])
            for _ in range(n_steps)
        ),
    }
    bad = rng.choice([0.2, 0.6, 1.0])
    events = tuple(
        _event(rng, n_microbatches) if rng.random() < bad else None
        for _ in range(n_steps)
    )
    return History(**(values | {"events": events} | fixed))


def vary(history: History) -> History:
    """Add what only random histories have: it depends on the seed as well."""
    rng = random.Random(f"more {history.seed}")
    more: dict[str, Any] = {
        name: rng.random() < 0.3 for name in ("noise", "in_place", "freezes")
    }
    if rng.random() < 0.3:
        more["optimizer"] = rng.choice(["several", "matrices only"])
    return replace(history, **more)


def _event(rng: random.Random, n_microbatches: int) -> Event:
    return Event(
        layer=rng.randrange(N_LAYERS),
        parameter=rng.choice(["norm.weight", "linear.weight", "linear.bias"]),
        microbatch=rng.randrange(n_microbatches),
        factor=rng.choice([1e5, 1e5, math.inf, -math.inf, math.nan]),
    )


class Injector:
    """Spoils gradients as the history says.

    A parameter's hook is called once a micro-batch, in the order of the passes.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.event: Event | None = None
        self._calls: dict[str, int] = {}
        for name, parameter in pipeline.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self._hook, name))

    def begin(self, event: Event | None) -> None:
        self.event = event
        self._calls.clear()

    def _hook(self, name: str, gradient: Tensor) -> Tensor | None:
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        event = self.event
        if event is None or name != f"layers.{event.layer}.{event.parameter}":
            return None
        return gradient * event.factor if call == event.microbatch else None


def make(history: History, n_stages: int | None, **more: Any) -> Pipeline:
    layers = build(
        range(N_LAYERS),
        dropout=history.dropout,
        dtype=history.dtype,
        noise=history.noise,
        in_place=history.in_place,
    )
    layers[3].linear.weight.requires_grad_(not history.freezes)
    scaler = LossScaler(2.0**8, growth_interval=2) if history.loss_scale else None
    settings: dict[str, Any] = {
        "loss_scale": scaler,
        "clip_grad_norm": CLIP,
        "snapshots": history.rollback == "snapshot",
        "max_consecutive_skips": None,
        "seed": history.seed,
    }
    return flat_pipeline(
        layers,
        loss_fn=lambda y, t: ((y.float() - t) ** 2).sum(),
        optimizer=OPTIMIZERS[history.optimizer],
        schedule=history.mode,
        n_stages=n_stages,
        n_microbatches=history.n_microbatches,
        **(settings | more),
    )


def batch(history: History, step: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1000 * history.seed + step)
    x = torch.randn(2 * history.n_microbatches, WIDTH, generator=generator)
    inputs, targets = x.to(history.dtype), x.roll(1, 1)
    if not history.in_place:
        return inputs, targets
    m = history.n_microbatches  # views of one tensor would share a version counter
    return [part.clone() for part in inputs.tensor_split(m)], targets


def run(history: History, n_stages: int | None, **more: Any) -> Outcome:
    """Run a history and look where it says."""
    pipeline = make(history, n_stages, **more)
    injector = Injector(pipeline)
    schedulers = [
        _schedule(history.scheduler, optimizer)
        for optimizer in pipeline.optimizers
        if history.scheduler is not None
    ]
    results, states = [], []
    torch.manual_seed(history.seed)
    random.seed(history.seed)
    parameters = dict(pipeline.named_parameters())
    for step, (event, action) in enumerate(
        zip(history.events, history.looks, strict=True)
    ):
        injector.begin(event)
        if history.freezes and "layers.3.norm.weight" in parameters:
            parameters["layers.3.linear.weight"].requires_grad_(step >= 2)
            parameters["layers.3.norm.weight"].requires_grad_(step < 1)
        results.append(pipeline.step(*batch(history, step)))
        if action == "read":
            assert math.isfinite(results[-1].loss)
        for scheduler in schedulers:
            scheduler.step()
        if action == "synchronize":
            pipeline.synchronize()
        elif action == "state_dict":
            states.append(look(pipeline, schedulers))
        elif action == "evaluate":
            states.append({"loss": pipeline.evaluate(*batch(history, 99))})
    states.append(look(pipeline, schedulers))
    outcome = Outcome(
        [(result.loss, result.grad_norm, result.skipped) for result in results],
        states,
        [result.rollbacks for result in results],
        torch.get_rng_state(),
        random.getstate(),
    )
    pipeline.close()
    return outcome


def compare(history: History) -> tuple[str | None, Outcome]:
    """Run with and without post-validation."""
    with small_buckets():
        ours = run(history, history.n_stages, post_validation=True)
    theirs = run(history, history.n_stages, post_validation=False)
    return difference(ours, theirs), ours
