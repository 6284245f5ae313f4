"""Optimizers and schedulers of scripts: what they step, their states, and refusals.

That every optimizer of torch is rolled back to the bit is in test_histories.py.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from histories import refusal
from pool import Pool
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, SequentialLR, StepLR

import zbpp
import zbpp.checkpoint

Named = Iterable[tuple[str, nn.Parameter]]
M = 4
mse = nn.functional.mse_loss
sgd = partial(torch.optim.SGD, lr=0.1)


def layers(*, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(4)]
    if tied:
        inner[3][0].weight = inner[0][0].weight
    return nn.Sequential(*inner, nn.Linear(8, 9))


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 8, generator=generator)
    return x, torch.randn(8, 9, generator=generator)


def make(
    optimizer: Any, n_stages: int | None = 2, mode: str = "ZBH1", **more: Any
) -> zbpp.Pipeline:
    settings = {"model": layers(), "loss_fn": mse, "n_microbatches": M} | more
    model = settings.pop("model")
    return zbpp.Pipeline(
        model, mode, optimizer=optimizer, n_stages=n_stages, **settings
    )


def two_kinds(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """As Muon is used: one optimizer for the matrices, another one for the rest."""
    every = list(parameters)
    return [
        torch.optim.SGD([p for p in every if p.dim() > 1], lr=0.05, momentum=0.9),
        torch.optim.AdamW([p for p in every if p.dim() < 2], lr=0.05),
    ]


# The plain loop.

Training = tuple[nn.Module, list[Any], list[LRScheduler]]


def loop(
    training: Training,
    steps: Iterable[int],
    *,
    clip: float = 1e9,
    before_step: Callable[..., object] = lambda *_: None,
) -> list[tuple[float, float]]:
    """Losses and norms; those of parameters that an optimizer has."""
    model, optimizers, schedulers = training
    stepped = [p for x in optimizers for g in x.param_groups for p in g["params"]]
    results = []
    for step in steps:
        before_step(step, model)
        total = 0.0
        for x, y in zip(*(t.tensor_split(M) for t in batch(step)), strict=True):
            loss = mse(model(x), y) / M
            loss.backward()
            total += loss.item()
        results.append((total, float(nn.utils.clip_grad_norm_(stepped, clip))))
        for thing in (*optimizers, *schedulers):
            thing.step()
        model.zero_grad()
    return results


def thaw(step: int, model: nn.Sequential) -> None:
    """One layer is frozen before step 2, another one from step 3 on."""
    model[1].requires_grad_(step >= 2)
    model[3].requires_grad_(step < 3)


def matrices(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [sgd([p for p in parameters if p.dim() > 1])]


@pytest.mark.filterwarnings("ignore:.*no optimizer steps them:UserWarning")
@pytest.mark.parametrize(
    ("mode", "optimizer"),
    [("1F1B", two_kinds), ("ZBH1", matrices), ("ZBV", two_kinds)],
)
def test_frozen_and_other_parameters_are_left_out_as_in_a_plain_loop(
    mode: str, optimizer: Any
) -> None:
    ours, theirs = layers(), layers()
    thaw(0, ours)
    with make(optimizer, 2, mode, model=ours, clip_grad_norm=0.5) as pipeline:
        found = []
        for step in range(5):
            thaw(step, ours)
            result = pipeline.step(*batch(step))
            found.append((result.loss, result.grad_norm))
    training: Training = (theirs, optimizer(theirs.parameters()), [])
    expected = loop(training, range(5), clip=0.5, before_step=thaw)
    assert found == [pytest.approx(result, rel=1e-5) for result in expected]
    for value, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-6)


class Spectral(nn.Module):
    """Multiplies frequencies by complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x) @ self.weight.mT @ self.weight
        return torch.tanh(torch.fft.irfft(spectrum, 8)) + x


@pytest.mark.parametrize(("mode", "sparse"), [("1F1B", False), ("ZBV", True)])
def test_complex_and_sparse_gradients_are_clipped_and_stepped(
    mode: str, sparse: bool
) -> None:
    def model() -> nn.Sequential:
        torch.manual_seed(0)
        embedding = nn.Embedding(11, 8, sparse=sparse)
        return nn.Sequential(embedding, nn.Linear(8, 8), Spectral(), nn.Linear(8, 9))

    ours, theirs, clip = model(), model(), 0.05
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    policy = zbpp.StepPolicy(post_validation=True)
    how: dict[str, Any] = {"step": policy, "clip_grad_norm": clip, "model": ours}
    pipeline = make(partial(torch.optim.SGD, lr=0.5), 2, mode, **how)
    for step in range(3):
        tokens = torch.randint(11, (8,), generator=torch.Generator().manual_seed(step))
        result = pipeline.step(tokens, batch(step)[1])
        for x, y in zip(tokens.chunk(M), batch(step)[1].chunk(M), strict=True):
            (mse(theirs(x), y) / M).backward()
        gradients = [p.grad.to_dense() for p in theirs.parameters()]
        norm = sum(float(g.abs().double().square().sum()) for g in gradients) ** 0.5
        for p in theirs.parameters():
            p.grad.mul_(min(1.0, clip / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert result.rollbacks == 1
    pipeline.close()
    for value, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(value, other)


# Schedulers of learning rates.


def step_rate(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return StepLR(optimizer, 1, gamma=0.1)


def sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return SequentialLR(optimizer, [step_rate(optimizer), step_rate(optimizer)], [2])


def groups_of(parameters: Any, *, empty: bool) -> torch.optim.Optimizer:
    """Two groups, of which the second has parameters of the last layer alone."""
    parts: dict[bool, list[Any]] = {False: [], True: []}
    for parameter in parameters:
        parts[parameter.shape == (9, 8)].append(parameter)
    groups: list[dict[str, Any]] = [{"params": parts[False]}]
    if parts[True] or empty:
        groups.append({"params": parts[True], "lr": 0.2})
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize("scheduler", [step_rate, sequence])
def test_schedulers_of_one_stage_alone_are_refused(scheduler: Any) -> None:
    pipeline = make(sgd)
    first, second = map(scheduler, pipeline.optimizers)
    for some in ([first], [second]):
        assert "train at different rates" in refusal(pipeline.attach, *some)
    pipeline.attach(first, second)


def test_one_of_two_kinds_may_have_schedulers() -> None:
    every = (pipeline := make(two_kinds)).optimizers
    pipeline.attach(*map(step_rate, every[::2]))
    text = refusal(pipeline.attach, step_rate(every[0]), step_rate(every[3]))
    assert "for x in pipeline.optimizers" in text


@pytest.mark.parametrize(
    ("n_scheduled", "n_attached", "n_warnings"), [(0, 0, 0), (2, 2, 0), (2, 0, 1)]
)
def test_a_save_warns_once_of_schedulers_that_are_not_attached(
    n_scheduled: int,
    n_attached: int,
    n_warnings: int,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipeline = make(sgd)
    schedulers = [step_rate(x) for x in pipeline.optimizers[:n_scheduled]]
    pipeline.attach(*schedulers[:n_attached])
    with caplog.at_level(logging.WARNING, logger="zbpp"):
        for _ in range(2):
            pipeline.step(*batch())
            pipeline.save(tmp_path, wait=True)
    assert caplog.text.count("LR scheduler that is not attached") == n_warnings


@pytest.mark.parametrize("scheduler", [step_rate, sequence])
@pytest.mark.parametrize("optimizer", [two_kinds, partial(groups_of, empty=True)])
def test_one_state_of_schedulers_fits_any_number_of_stages(
    scheduler: Any, optimizer: Any, tmp_path: Path
) -> None:
    made = optimizer(list(layers().parameters()))
    expected = [scheduler(one) for one in (made if isinstance(made, list) else [made])]
    for n_stages in (2, 4, 1):
        pipeline = make(optimizer, n_stages)
        schedulers = [scheduler(one) for one in pipeline.optimizers]
        pipeline.attach(*schedulers)
        pipeline.load(tmp_path, missing_ok=True)
        pipeline.step(*batch())
        for one in expected:
            one.optimizer.step()
        for one in (*schedulers, *expected):
            one.step()
        pipeline.save(tmp_path, wait=True)
        assert len(pipeline.state_dict()["schedulers"]) == len(expected)
        rates = [one.get_last_lr() for one in expected]
        assert [one.get_last_lr() for one in schedulers] == rates * n_stages
        groups = [[g["lr"] for g in one.param_groups] for one in pipeline.optimizers]
        assert groups == rates * n_stages


def test_states_of_schedulers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    pipeline = make(partial(groups_of, empty=False))
    pipeline.attach(*map(step_rate, pipeline.optimizers))
    text = refusal(pipeline.save, tmp_path)
    assert "the stages have StepLR 0 of SGD 0 with different states" in text
    assert "empty ones too" in text
    saved, other = make(partial(groups_of, empty=True)), make(sgd)
    for one in (saved, other):
        one.attach(*map(step_rate, one.optimizers))
    text = refusal(other.load_state_dict, saved.state_dict())
    assert "StepLR 0 of SGD 0 has 2 parameter groups, here 1" in text


# A plain training goes on in a pipeline.

HALF, STEPS = 3, 6


def of_names(make_optimizer: Any) -> Any:
    def optimizer(named_parameters: Named) -> Any:
        return make_optimizer([p for _, p in named_parameters])

    return optimizer


def decaying(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups, as usual: matrices decay."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.05)


BUILDERS = {
    "adamw": of_names(decaying),
    "momentum": of_names(partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
    "two": of_names(two_kinds),
}


def plain_training(how: str, *, tied: bool) -> Training:
    model = layers(tied=tied)
    made = BUILDERS[how](model.named_parameters())
    optimizers = made if isinstance(made, list) else [made]
    return model, optimizers, [StepLR(x, 2, 0.5) for x in optimizers]


def losses_of_a_plain_loop(how: str, *, tied: bool) -> list[float]:
    results = loop(plain_training(how, tied=tied), range(STEPS))
    return [loss for loss, _ in results[HALF:]]


def resume(
    how: str, mode: str, n_stages: int | None, tied: bool, moments: bool
) -> list[float]:
    """Losses of a pipeline that goes on from a plain training."""
    training = plain_training(how, tied=tied)
    loop(training, range(HALF))
    model, optimizers, rates = training
    state = zbpp.checkpoint.plain_state(model, optimizers, schedulers=rates, step=HALF)
    pipeline = make(BUILDERS[how], n_stages, mode, model=model)
    here = [StepLR(x, 2, 0.5) for x in pipeline.optimizers]
    pipeline.attach(*here)
    pipeline.load_state_dict(state, model_only=not moments)
    losses = []
    for step in range(HALF, STEPS):
        losses.append(pipeline.step(*batch(step)).loss)
        for rate in here:
            rate.step()
    assert pipeline.n_steps == (STEPS if moments else STEPS - HALF)
    pipeline.close()
    return losses


@pytest.mark.parametrize(
    ("how", "tied"),
    [("adamw", False), ("adamw", True), ("momentum", False), ("two", True)],
)
def test_moments_and_rates_go_from_a_plain_loop_into_a_pipeline(
    how: str, tied: bool
) -> None:
    expected = losses_of_a_plain_loop(how, tied=tied)
    found = resume(how, "ZBV", 2, tied, True)
    assert found == pytest.approx(expected, rel=1e-5)
    without = resume(how, "ZBV", 2, tied, False)
    assert without[1:] != pytest.approx(expected[1:], rel=1e-3), "moments matter"


@pytest.mark.dist
def test_moments_go_into_the_stages_of_processes(pool: Pool) -> None:
    expected = losses_of_a_plain_loop("adamw", tied=True)
    for found in pool.run(resume, 2, "adamw", "ZBH1", None, True, True):
        assert found == pytest.approx(expected, rel=1e-5)
