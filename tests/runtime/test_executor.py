"""Programs are bound to a table of handlers once; wrong bindings are noticed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_model import batch, make_pipeline, train, train_plainly
from torch import Tensor

from zbpp.core import KINDS, Pass, PassKind, Value, input_of
from zbpp.runtime import executor
from zbpp.runtime.backward.split import SplitGraph


def neighbour_of(kind: PassKind) -> Callable[[Pass, int], Value | None]:
    """Bind what passes of a kind read to the place of another micro-batch."""

    def wrong(job: Pass, n_chunks: int) -> Value | None:
        if job.kind is kind:
            job = replace(job, microbatch=job.microbatch ^ 1)
        return input_of(job, n_chunks)

    return wrong


def without_weights(graph: SplitGraph, gradients: Any = None) -> Any:
    """B alone; what it leaves for W is forgotten."""
    found = graph.backward_input(gradients)
    graph._queue._work.clear()
    return found


def trains_as_ever(mode: str) -> bool:
    """False also where a step fails: no value is where it should be."""
    _, plain = train_plainly(steps=2)
    try:
        parameters: dict[str, Tensor] = train(mode, 2, steps=2)[2]
    except (AssertionError, ValueError) as error:
        text = f"{error} {error.__notes__}"
        assert "nobody has computed" in text or "batch_size" in text
        return False
    return all(torch.equal(plain[name], p) for name, p in parameters.items())


def test_a_wrong_place_and_a_lost_weight_gradient_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert trains_as_ever("1F1B")
    for kind in (PassKind.F, PassKind.BW):
        with monkeypatch.context() as patched:
            patched.setattr(executor, "input_of", neighbour_of(kind))
            assert not trains_as_ever("1F1B")
    monkeypatch.setattr(SplitGraph, "backward", without_weights)
    assert not trains_as_ever("1F1B")


def test_every_kind_of_job_has_a_handler() -> None:
    assert KINDS.keys() <= executor.HANDLERS.keys()


def test_a_pair_has_a_handler_and_the_bits_of_its_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs: list[str] = []
    run = executor.PairHandler.run

    def noted(self: executor.PairHandler) -> None:
        pairs.append(str(self.instruction))
        run(self)

    monkeypatch.setattr(executor.PairHandler, "run", noted)
    assert trains_as_ever("DualPipeV")
    assert "(0F3;3BW1)OVERLAP_F_B" in pairs


def test_programs_stay_bound_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    n_bound = 0
    bind = executor.BoundProgram.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal n_bound
        n_bound += 1
        bind(self, *args, **kwargs)

    monkeypatch.setattr(executor.BoundProgram, "__init__", counted)
    pipeline = make_pipeline("ZBH1", 1)
    losses = [pipeline.evaluate(*batch(99), n_microbatches=m) for m in (3, 3, 4, 3)]
    assert losses[0] == losses[1] == losses[3] == pytest.approx(losses[2])
    assert n_bound == 3  # for 3, 4 and 3 micro-batches
    pipeline.step(*batch(0))
    pipeline.evaluate(*batch(99), n_microbatches=3)
    pipeline.step(*batch(1))
    assert n_bound == 4
    pipeline.close()
