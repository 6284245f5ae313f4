"""Each part of a rollback is needed: without it, other bits come out."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from histories import ALWAYS, INF, SPIKE, compare, draw, run
from moments import uncertain_sums
from outcomes import difference
from torch import Tensor

from zbpp.runtime.optim.optimizers import GroupValues
from zbpp.runtime.optim.rollback import DeferredStep, SnapshotStep
from zbpp.runtime.optim.stage_optimizer import StageOptimizer, StepState
from zbpp.runtime.optim.step_state import LossScaler
from zbpp.runtime.replay import Replay


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _no_undo(self: DeferredStep) -> None:
    """The parameters stay as the speculative step has made them."""


def _commit_nothing(self: DeferredStep) -> None:
    """m and v stay those of the step before."""


def _copy_once(self: DeferredStep, parameter: Tensor) -> None:
    """The copies stay those of the first step."""
    if parameter not in self._copies:
        self._copies[parameter] = parameter.detach().clone()


@torch.no_grad()
def _undo_parameters_only(self: SnapshotStep) -> None:
    for parameter, copied in self._parameters.items():
        parameter.copy_(copied)


def _trust_always(self: DeferredStep) -> None:
    """Steps of fused optimizers leave no mark on what they write to."""


def _validate_without_replay(self: StageOptimizer, job: Any) -> bool:
    self._decide(job)
    self._state = StepState.IDLE
    return False


def _run_with_values_of_now(self: GroupValues, action: Callable[[], object]) -> None:
    action()


def _rewind_without_buffers(self: Replay) -> None:
    self._is_rewound = True
    self._stage.discard()


BROKEN = {
    "undo": (DeferredStep, "undo", _no_undo, {"rollback": "deferred"}),
    "copy": (DeferredStep, "_copy", _copy_once, {"rollback": "deferred"}),
    "forget": (
        DeferredStep,
        "forget",
        _trust_always,
        {"optimizer": "fused", "rollback": "deferred"},
    ),
    "commit": (DeferredStep, "commit", _commit_nothing, {"rollback": "deferred"}),
    "state": (SnapshotStep, "undo", _undo_parameters_only, {"rollback": "snapshot"}),
    "replay": (StageOptimizer, "validate", _validate_without_replay, {}),
    "rates": (GroupValues, "run", _run_with_values_of_now, {"scheduler": "steps"}),
    "buffers": (Replay, "rewind", _rewind_without_buffers, {}),
    "scale": (LossScaler, "update", None, {"loss_scale": True}),
}


@pytest.mark.parametrize("part", BROKEN)
def test_a_broken_rollback_is_noticed(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, broken, fixed = BROKEN[part]
    fixed = {"n_stages": 3, "patience": ALWAYS, "optimizer": "adamw"} | fixed
    events = (None, SPIKE, None, INF, None, SPIKE, INF)
    looks = ("", "", "state_dict", "", "", "", "")
    history = draw(5, n_microbatches=3, events=events, looks=looks, **fixed)
    assert compare(history)[0] is None
    plain = run(history, 3, post_validation=False)
    if broken is None:  # of the two runs, only the speculative one may be broken
        broken = partial(_twice, getattr(owner, name))
        monkeypatch.setattr(owner, name, lambda self, finite: broken(self, finite))
    else:
        monkeypatch.setattr(owner, name, broken)
    with uncertain_sums(0):
        try:
            ours = run(history, 3, post_validation=True)
        except RuntimeError as error:  # autograd sees that the weights are others
            assert "modified by an inplace operation" in str(error)
        else:
            assert difference(ours, plain) is not None


def _twice(update: Callable[..., None], scaler: LossScaler, finite: bool) -> None:
    update(scaler, finite)
    update(scaler, finite)
