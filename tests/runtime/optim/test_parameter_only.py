"""Speculative steps of parameters alone have the optimizer's bits, or are refused."""

import logging
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from histories import compare, draw, vary
from rollback_checks import (
    Make,
    check,
    finish,
    give_gradients,
    growths,
    held,
    live_bytes,
    make,
    stepped_once,
)
from small_model import make_pipeline, refusal
from torch import Tensor, nn

from zbpp.runtime.optim.rollback import adam_kernel, choose, parameter_only
from zbpp.runtime.optim.rollback.adam_kernel import NoKernel
from zbpp.runtime.optim.rollback.choose import RollbackChooser
from zbpp.runtime.optim.rollback.parameter_only import ParameterStep
from zbpp.runtime.optim.rollback.recompute import RecomputeRollback, Rollback
from zbpp.runtime.optim.step_state import StepRules

SHAPES = ((64, 64), (7, 5), (200, 3), (16,), (4096,), (128,), (65, 64))
"""Whole rows of 64 numbers, rows and a rest, and less than a row."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMULAS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW without decay": {"weight_decay": 0.0, "betas": (0.8, 0.95)},
    "AdamW with a short mean": {"betas": (0.3, 0.9)},
    "Adam": {},
    "Adam with decay": {"weight_decay": 0.1},
}


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_only, "_SMALLEST", 64)
    torch.set_num_threads(1)


def fused(name: str = "AdamW", dtype: torch.dtype = torch.float32, **more: Any) -> Make:
    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        own = [nn.Parameter(p.detach().to(dtype)) for p in parameters]
        options = {"lr": 0.01, "fused": True, **FORMULAS.get(name, {}), **more}
        return getattr(torch.optim, name.split()[0])(own, **options)

    return build


def alone(optimizer: torch.optim.Optimizer) -> RecomputeRollback:
    return RecomputeRollback(optimizer, ParameterStep(optimizer))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if place == 0 else pytest.mark.slow)
        for place, (name, dtype) in enumerate(product(FORMULAS, DTYPES))
    ],
)
def test_valid_and_invalid_steps(name: str, dtype: torch.dtype) -> None:
    check(fused(name, dtype), alone, shapes=SHAPES)


def test_state_that_others_write_or_replace() -> None:
    """A checkpoint is loaded, and a parameter gets other memory, between steps."""
    plain, ours = make(fused(), SHAPES), make(fused(), SHAPES)
    rollback = alone(ours)
    for step in range(6):
        for each in (plain, ours):
            give_gradients(each, step)
        plain.step()
        rollback.speculate()
        finish(rollback.commit())
        if step == 2:
            rollback.forget()
            ours.load_state_dict(ours.state_dict())
        if step == 4:
            rollback.forget()
            for p in ours.param_groups[0]["params"]:
                p.data = p.data.clone()
    assert held(ours) == held(plain)


def test_what_it_takes() -> None:
    optimizer = make(fused(), SHAPES)
    rollback = alone(optimizer)
    give_gradients(optimizer, 1)
    rollback.speculate()
    assert not rollback.stepped_alone  # the first step makes the state
    finish(rollback.commit())
    parameters = optimizer.param_groups[0]["params"]
    parameters[4].grad = torch.ones(4096, 2)[:, 0]  # not in one piece
    rollback.speculate()
    assert rollback.stepped_alone == {parameters[i] for i in (0, 2, 5, 6)}
    rollback.undo()
    optimizer.param_groups[0]["betas"] = (0.5, 0.99)  # not tried at the start
    rollback.speculate()
    assert not rollback.stepped_alone


@pytest.mark.slow
def test_it_copies_nothing_but_the_parameters() -> None:
    optimizer = stepped_once(64)
    rollback = alone(optimizer)
    before = live_bytes()
    for growth in growths(rollback, before):
        assert len(rollback.stepped_alone) == 4
        assert growth <= 4 * 1000 * 64 * 4 + 64
    optimizer.zero_grad()
    assert live_bytes() - before <= 64  # a copy came, and the gradients went


def check_histories(seeds: range) -> None:
    """Whole pipelines, as in `test_post_validation.py`."""
    for seed in seeds:
        history = vary(draw(seed))
        history = replace(history, optimizer="fused", rollback="compiled")
        found, _ = compare(history)
        assert found is None, f"{found}\n{history}"


@pytest.mark.slow
def test_random_histories() -> None:
    check_histories(range(6))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_random_histories() -> None:
    check_histories(range(6, 66))


# What is not the optimizer's step to the last bit is refused.


def test_another_formula_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that is rounded before the sum: other bits in some of the numbers."""
    monkeypatch.setattr(adam_kernel, "multiply_add", lambda: lambda a, b, c: a * b + c)
    adam_kernel._compile.cache_clear()
    try:
        with pytest.raises(NoKernel, match=r"differs .* in \d+ of 262144 numbers"):
            alone(make(fused(), SHAPES))
    finally:
        adam_kernel._compile.cache_clear()


def test_a_difference_later_on_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make(fused(), SHAPES)
    rollback = alone(optimizer)
    give_gradients(optimizer, 1)
    rollback.speculate()
    finish(rollback.commit())
    kernel = parameter_only.adam_kernel

    def other(*arguments: Any) -> Any:
        step = kernel(*arguments)

        def off(p: Tensor, *more: Tensor) -> None:
            step(p, *more)
            p[1, 1] = torch.nextafter(p[1, 1], torch.tensor(9.0))

        return off

    monkeypatch.setattr(parameter_only, "adam_kernel", other)
    with pytest.raises(RuntimeError, match=r"the compiled step .* differs"):
        rollback.speculate()
        finish(rollback.commit())


@pytest.mark.parametrize(
    ("make_optimizer", "reason"),
    [
        (fused(fused=False), "no parameter group of AdamW"),
        (fused(amsgrad=True), "no parameter group of AdamW"),
        (fused(lr=torch.tensor(0.1)), "no parameter group of AdamW"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "SGD is neither torch's Adam nor AdamW"),
    ],
)
def test_other_optimizers_are_refused(make_optimizer: Make, reason: str) -> None:
    with pytest.raises(NoKernel, match=reason):
        ParameterStep(make(make_optimizer))


# Which way is taken.


def way(optimizer: torch.optim.Optimizer, asked: str) -> Rollback:
    rules = StepRules(post_validation=True, rollback=asked)
    return RollbackChooser(optimizer, rules, is_reporter=True).now()


def test_large_stages_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(asked: str) -> bool:
        rollback = way(make(fused(), SHAPES), asked)
        assert isinstance(rollback, RecomputeRollback)
        return rollback.steps_alone

    assert not compiles("auto")
    assert compiles("compiled")
    monkeypatch.setattr(choose, "_PAYS", 1000)
    assert compiles("auto")
    assert not compiles("deferred")


def test_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(*_: object) -> None:
        raise RuntimeError("No working C++ compiler found\nin a long list")

    monkeypatch.setattr(adam_kernel, "compiled", compiled)
    monkeypatch.setattr(choose, "_PAYS", 1000)
    adam_kernel._compile.cache_clear()
    caplog.set_level(logging.INFO, "zbpp")
    rollback = way(make(fused(), SHAPES), "auto")
    assert isinstance(rollback, RecomputeRollback)
    assert not rollback.steps_alone
    assert caplog.messages[0].endswith("compiled: No working C++ compiler found")


def test_with_compilation_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    adam_kernel._compile.cache_clear()
    with pytest.raises(NoKernel, match=r"torch\.compile is switched off"):
        alone(make(fused(), SHAPES))


def test_a_compiled_step_that_cannot_be_is_an_error() -> None:
    def refused(rollback: str) -> str:
        optimizer = partial(torch.optim.SGD, lr=0.1)
        return refusal(make_pipeline, "ZBH1", 2, optimizer=optimizer, rollback=rollback)

    assert "but SGD is neither torch's Adam nor AdamW" in refused("compiled")
    assert "choose 'deferred'" in refused("compiled")
    assert "choose one of 'auto', 'deferred'" in refused("copied")
