"""The consequences of decisions: speculation, loss scale, a diagnosis of skips."""

import logging
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from histories import SPIKE, Event, Injector, batch, draw, make, run
from pool import Pool
from small_model import assert_same, make_pipeline
from small_model import batch as tokens
from torch import Tensor

from zbpp.runtime import LossScaler, NonFiniteError
from zbpp.runtime.optim import optimizers


@pytest.fixture
def said() -> Iterator[list[str]]:
    """The messages of zbpp's logger."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    listener = Listener()
    logging.getLogger("zbpp").addHandler(listener)
    yield lines
    logging.getLogger("zbpp").removeHandler(listener)


def run_with(events: str, *, post_validation: bool | None = True, **more: Any) -> Any:
    """A history: ``x`` is clipped, ``i`` has an Inf, ``.`` is clean."""
    kinds = {"x": SPIKE, "i": Event(5, "norm.weight", 0, math.inf), ".": None}
    fixed = {"n_stages": 3, "mode": "ZBH1", "optimizer": "adamw", "scheduler": None}
    fixed |= {"looks": ("",) * len(events), "loss_scale": False, "n_microbatches": 2}
    history = draw(3, events=tuple(kinds[e] for e in events), **(fixed | more))
    return run(history, 3, post_validation=post_validation)


def test_ten_valid_steps_in_a_row_make_the_next_ones_speculative() -> None:
    """A clipped step, ``x``, is rolled back where it was speculative."""
    events = ".........x" + "..........x" + "x"
    rollbacks = run_with(events, post_validation=None).rollbacks
    assert [i for i, n in enumerate(rollbacks) if n] == [20]
    assert run_with("xx.", post_validation=True).rollbacks == [1, 1, 0]


def test_an_optimizer_that_needs_a_snapshot_is_named_once(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "_SMALL_BYTES", 1)
    run_with("....", optimizer="counting", rollback="deferred")
    assert len(said) == 1 and "Counting can only be rolled back by a copy" in said[0]


# The loss scale.


def test_the_scale_moves_as_torchs_does() -> None:
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=2.0**10, growth_interval=3, enabled=True
    )
    ours = LossScaler(2.0**10, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for finite in (True, True, False, True, True, True, True, False, False, True):
        weight.grad = torch.ones(1) if finite else torch.full((1,), math.inf)
        theirs.scale(torch.ones(1))
        theirs.step(optimizer)
        theirs.update()
        ours.update(finite)
        assert ours.scale == theirs.get_scale()
    again = LossScaler()
    again.load_state_dict(ours.state_dict())
    assert again.state_dict() == ours.state_dict()


def test_a_scaled_loss_gives_the_same_gradients() -> None:
    """Powers of 2 leave every bit."""
    plain = run_with("....", loss_scale=False, dtype=torch.float32)
    scaled = run_with("....", loss_scale=True, dtype=torch.float32)
    assert plain.results == scaled.results
    assert scaled.states[-1]["loss scale"] == {"scale": 2.0**10, "good_steps": 0}


def test_a_skip_that_searches_for_a_scale_is_no_fault() -> None:
    history = draw(3, events=(Event(5, "norm.weight", 0, math.inf),) * 6)
    pipeline = make(
        history, 2, loss_scale=LossScaler(8.0), max_consecutive_skips=2, seed=None
    )
    injector = Injector(pipeline)
    for step in range(4):  # 8, 4 and 2 may shrink; 1 may not
        injector.begin(history.events[step])
        pipeline.step(*batch(history, step))
    pipeline.synchronize()
    assert pipeline.loss_scaler is not None and pipeline.loss_scaler.scale == 0.5
    injector.begin(history.events[4])
    with pytest.raises(NonFiniteError, match=r"^2 step\(s\)"):
        pipeline.step(*batch(history, 4))
        pipeline.synchronize()


# The diagnosis.


def diagnose(
    n_stages: int | None, mode: str, post_validation: bool, event: Event, n_skips: int
) -> tuple[str, int]:
    """The message, and after how many steps it came."""
    history = draw(
        3, mode=mode, events=(), looks=(), n_microbatches=5, loss_scale=False
    )
    pipeline = make(
        history, n_stages, post_validation=post_validation,
        max_consecutive_skips=n_skips,
    )  # fmt: skip
    injector = Injector(pipeline)
    for step in range(20):
        injector.begin(event if step >= 2 else None)
        try:
            pipeline.step(*batch(history, step))
        except NonFiniteError as error:
            return str(error), step
    raise AssertionError("the run went on")


def diagnose_behind_a_slow_stage(event: Event) -> tuple[str, int]:
    """Stage 1 still computes what it owes to stage 2 when that has read the sum."""
    wait = torch.nn.Linear.forward

    def slowly(layer: torch.nn.Linear, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            time.sleep(0.02)
        return wait(layer, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Linear, "forward", slowly)
        return diagnose(None, "ZBV", True, event, 3)


@pytest.mark.parametrize(
    ("mode", "early", "n_skips"),
    [("ZBH1", True, 3), ("ZBV", True, 1), ("ZBV", False, 3), ("1F1B", False, 1)],
)
def test_many_skips_end_with_the_place_of_the_first(
    mode: str, early: bool, n_skips: int
) -> None:
    for layer, parameter, microbatch in (
        (5, "norm.weight", 3), (0, "linear.bias", 0), (7, "linear.weight", 4),
    ):  # fmt: skip
        event = Event(layer, parameter, microbatch, math.nan)
        message, step = diagnose(4, mode, early, event, n_skips)
        place = f"came up in layers.{layer}:"
        assert message.startswith(f"{n_skips} step(s) in a row were skipped")
        assert place in message
        assert f"in step {1 + n_skips} (from 0)" in message
        assert step == 1 + n_skips + early


@pytest.mark.dist
def test_all_ranks_end_with_the_same_diagnosis(pool: Pool) -> None:
    event = Event(5, "linear.weight", 2, math.inf)
    answers = pool.run(diagnose_behind_a_slow_stage, 3, event)
    assert len(set(answers)) == 1
    message, _ = answers[0]
    assert "came up in layers.5:" in message


def train_in_fp16(post_validation: bool) -> tuple[list[Any], dict[str, torch.Tensor]]:
    pipeline = make_pipeline(
        "ZBV", 2, autocast=torch.float16, loss_scale=LossScaler(2.0**40),
        clip_grad_norm=1.0, post_validation=post_validation,
    )  # fmt: skip
    results = [pipeline.step(*tokens(0)) for _ in range(40)]
    parameters = {n: p.detach() for n, p in pipeline.named_parameters()}
    assert pipeline.loss_scaler is not None
    told = [(r.loss, repr(r.grad_norm), r.skipped) for r in results]
    return [*told, pipeline.loss_scaler.scale], parameters


@pytest.mark.slow
def test_fp16_finds_its_scale_and_learns() -> None:
    ours, parameters = train_in_fp16(True)
    theirs, others = train_in_fp16(False)
    assert ours == theirs
    assert_same(parameters, others)
    *results, scale = ours
    assert results[0][2] and not results[-1][2] and scale < 2.0**40
    assert results[-1][0] < 0.8 * results[0][0]
