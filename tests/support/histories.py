"""Random histories of steps: clean, clipped, Inf and NaN, on random pipelines.

A history is drawn from a seed and run twice, with and without post-validation; both
must leave the same bits, whenever somebody looks.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from moments import idle_moments, uncertain_sums
from outcomes import Outcome, difference, look
from torch import Tensor, nn

from zbpp.pipeline import Pipeline
from zbpp.runtime.optim.loss_scale import LossScaler
from zbpp.runtime.optim.patience import Patience

N_LAYERS = 8
WIDTH = 8
MODES = ("ZBH1", "ZBH2", "ZBV", "1F1B")
CLIP = 40.0  # far above the norm of a clean step
ALWAYS = Patience(failures=11)


class Layer(nn.Module):
    """Has a gain, a matmul, dropout, and buffers that every forward changes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.linear(self.norm(x)))
        self.mean.lerp_(y.detach().float().mean(0), 0.1)
        self.seen = self.seen + 1  # replaced, not changed in place
        return x + torch.tanh(y) * 0.5 + self.mean.to(x.dtype) * 0.01


def build(layers: range, *, dropout: float, dtype: torch.dtype) -> list[nn.Module]:
    built = []
    for index in layers:
        torch.manual_seed(index)
        layer = Layer(dropout)
        layer.norm.to(dtype)
        layer.linear.to(dtype)
        built.append(layer)
    return built


class Counting(torch.optim.SGD):
    """Unknown to zbpp: counts its steps in a group and uses the count."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["sum"] = state.get("sum", 0.0) + p.grad
                    p.sub_(state["sum"], alpha=group["lr"] / group["count"])


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Weights decay, the rest does not."""
    matrices = [p for p in parameters if p.dim() > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(_groups(p), lr=1e-2),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(_groups(p), lr=1e-2, momentum=0.9, nesterov=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "counting": lambda p: Counting(p, lr=1e-2),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
}


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
    patience: Patience
    events: tuple[Event | None, ...]
    looks: tuple[str, ...]


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
        "optimizer": rng.choice(list(OPTIMIZERS)),
        "scheduler": rng.choice([None, "steps", "one cycle"]),
        "dropout": rng.choice([0.0, 0.3]),
        "loss_scale": rng.random() < 0.3,
        "rollback": rng.choice(["deferred", "deferred", "snapshot"]),
        "patience": rng.choice([ALWAYS, ALWAYS, Patience(2, 3, 2)]),
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
    model = partial(build, dropout=history.dropout, dtype=history.dtype)
    scaler = LossScaler(2.0**8, growth_interval=2) if history.loss_scale else None
    settings: dict[str, Any] = {
        "loss_scale": scaler,
        "clip_grad_norm": CLIP,
        "rollback": history.rollback,
        "patience": history.patience,
        "max_consecutive_skips": None,
        "seed": history.seed,
    }
    return Pipeline(
        model,
        n_layers=N_LAYERS,
        loss_fn=lambda y, t: ((y.float() - t) ** 2).sum(),
        optimizer=OPTIMIZERS[history.optimizer],
        schedule=history.mode,
        n_stages=n_stages,
        n_microbatches=history.n_microbatches,
        **(settings | more),
    )


def batch(history: History, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * history.seed + step)
    x = torch.randn(2 * history.n_microbatches, WIDTH, generator=generator)
    return x.to(history.dtype), x.roll(1, 1)


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
    for step, (event, action) in enumerate(
        zip(history.events, history.looks, strict=True)
    ):
        injector.begin(event)
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
    )
    pipeline.close()
    return outcome


def compare(history: History) -> tuple[str | None, Outcome]:
    """Run with and without post-validation."""
    with uncertain_sums(history.seed), idle_moments(history.seed):
        ours = run(history, history.n_stages, post_validation=True)
    theirs = run(history, history.n_stages, post_validation=False)
    return difference(ours, theirs), ours
