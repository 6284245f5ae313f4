"""Runs that save and load: dropout, clipping, a scheduler, rollbacks, buffers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from small_model import N_LAYERS, batch, build, loss_fn, make_pipeline
from torch import Tensor, nn

from zbpp.checkpoint import load
from zbpp.pipeline import Pipeline

SEED, CLIP, STEPS, SAVED_AFTER = 7, 0.9, 6, 3
RUNS = {"ZBV": 4, "1F1B": 2, "VPP": 2, "ZBH1": 4}


class Counting(nn.Module):
    """A block with buffers that every forward changes, one of them not saved."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.training:
            self.mean.lerp_(y.detach().mean((0, 1)), 0.1)
            self.seen = self.seen + 1
        return y + 0.01 * self.mean


def layers_of(layers: range) -> list[nn.Module]:
    built = build(layers, dropout=0.3)
    return [
        Counting(one) if index in (2, 5) else one
        for index, one in zip(layers, built, strict=True)
    ]


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not; a stage may have none of one kind."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "lr": 2e-2},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)


def make(mode: str, n_stages: int | None, **more: Any) -> tuple[Pipeline, list[Any]]:
    settings = {
        "model": layers_of,
        "seed": SEED,
        "clip_grad_norm": CLIP,
        "post_validation": True,
        "optimizer": two_groups,
    } | more
    pipeline = make_pipeline(mode, n_stages, **settings)
    schedulers = [scheduler(one) for one in pipeline.optimizers]
    pipeline.attach(*schedulers)
    return pipeline, schedulers


Outcome = tuple[list[tuple[float, float]], dict[str, Tensor], int]
"""Loss and norm by step, parameters and buffers, rollbacks."""


def run(
    mode: str,
    n_stages: int | None,
    *,
    save: str | None = None,
    loaded: str | None = None,
    after_load: Callable[[Pipeline, list[Any]], object] | None = None,
    **more: Any,
) -> Outcome:
    """Six steps, or three and a save, or a load and three."""
    pipeline, schedulers = make(mode, n_stages, **more)
    if loaded is not None:
        assert pipeline.load(loaded) == {"position": [SAVED_AFTER, 0.1]}
    if after_load is not None:
        after_load(pipeline, schedulers)
    results = []
    end = STEPS if save is None else SAVED_AFTER
    for step in range(pipeline.n_steps, end):
        results.append(pipeline.step(*batch(step)))
        for one in schedulers:
            one.step()
    if save is not None:
        pipeline.save(save, extra={"position": [SAVED_AFTER, 0.1]}, wait=True)
    state = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    state |= {n: b.clone() for n, b in pipeline.named_buffers()}
    pipeline.close()
    numbers = [(one.loss, one.grad_norm) for one in results]
    return numbers, state, sum(one.rollbacks for one in results)


def run_in_processes(mode: str, save: str | None, loaded: str | None) -> Outcome:
    return run(mode, None, save=save, loaded=loaded)


class Constant(nn.Module):
    """A parameter that no step changes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.w[:1]


def make_constant(size: int = 1) -> Pipeline:
    return Pipeline(
        nn.Sequential(Constant(size)),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        schedule="1F1B",
        n_stages=1,
        n_microbatches=1,
    )


def step_and_fill(pipeline: Pipeline, value: float) -> None:
    pipeline.step(torch.ones(1), torch.ones(1))
    for _, parameter in pipeline.named_parameters():
        parameter.data.fill_(value)


def save_for_ever(folder: str) -> None:
    """A second save begins after the first, and is killed at any time."""
    pipeline = make_constant(2_000_000)
    for step in range(1, 100):
        step_and_fill(pipeline, step)
        pipeline.save(folder, keep=2)


class Plain(nn.Module):
    """The same model without zbpp."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers_of(range(N_LAYERS)))

    def forward(self, x: Tensor, step: int, microbatch: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            number = hash((SEED, step, index, microbatch)) & 0x7FFF_FFFF_FFFF_FFFF
            torch.default_generator.manual_seed(number)
            x = layer(x)
        return x


def run_plainly(loaded: str | Path) -> Outcome:
    """A loop of torch's own, from a checkpoint of a pipeline."""
    model = Plain()
    optimizer = two_groups(list(model.parameters()))
    rates = scheduler(optimizer)
    told = load(loaded, model, optimizers=[optimizer], schedulers=[rates])
    results = []
    for step in range(told["step"], STEPS):
        cut = zip(*(x.tensor_split(6) for x in batch(step)), strict=True)
        losses = []
        for microbatch, (inputs, targets) in enumerate(cut):
            loss = loss_fn(model(inputs, step, microbatch), targets)
            (loss / 6).backward()
            losses.append(loss.detach().double())
        norm = float(torch.stack(list(_squares(model))).sum().sqrt())
        factor = min(1.0, CLIP / (norm + 1e-6))
        for p in model.parameters():
            if factor < 1.0 and p.grad is not None:
                p.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        results.append((float(torch.stack(losses).mean()), norm))
    state = {n: p.detach() for n, p in model.named_parameters()}
    return results, state | dict(model.named_buffers()), 0


def _squares(model: Plain) -> Iterator[Tensor]:
    for layer in model.layers:
        norms = [
            torch.linalg.vector_norm(p.grad, dtype=torch.float64)
            for p in layer.parameters()
            if p.grad is not None
        ]
        yield torch.stack([norm.square() for norm in norms]).sum()
