"""A program is bound to its stage once; wrong bindings do not go unnoticed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_model import batch, make_pipeline, train, train_plainly
from torch import Tensor

from zbpp.core import Pass, PassKind, Value, input_of
from zbpp.runtime import bound
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
            patched.setattr(bound, "input_of", neighbour_of(kind))
            assert not trains_as_ever("1F1B")
    monkeypatch.setattr(SplitGraph, "backward", without_weights)
    assert not trains_as_ever("1F1B")


def test_programs_stay_bound_until_they_change() -> None:
    pipeline = make_pipeline("ZBH1", 2)
    found = [pipeline.evaluate(*batch(99), n_microbatches=m) for m in (3, 3, 4, 3)]
    assert found[0] == found[1] == found[3] == pytest.approx(found[2])
    (executor, _) = pipeline._executors.values()
    evaluates = executor._bound[False]
    pipeline.step(*batch(0))
    trains = executor._bound[True]
    pipeline.evaluate(*batch(99), n_microbatches=3)
    pipeline.step(*batch(1))
    assert executor._bound == {False: evaluates, True: trains}
    pipeline.evaluate(*batch(99), n_microbatches=6)
    assert executor._bound[False] is not evaluates
