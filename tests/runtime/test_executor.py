"""Programs are bound to a table of handlers, once."""

from typing import Any

import pytest
from small_model import assert_same, batch, make_pipeline, train, train_plainly

from zbpp.core import KINDS
from zbpp.runtime import executor


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
    _, plain = train_plainly(steps=2)
    assert_same(train("DualPipeV", 2, steps=2)[2], plain)
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
