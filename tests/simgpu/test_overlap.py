"""Passes that stop at their points on the simulated device: same bits, no race, two
streams."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from moe import moe_costs
from small_model import assert_same
from talking import N_MICROBATCHES, WIDTH, Outcome, exchange, make, talking, train
from torch import Tensor

import simgpu
from zbpp.core import Lane, PassKind
from zbpp.runtime.overlap import OpenPass
from zbpp.runtime.support import streams
from zbpp.runtime.support.streams import NetworkStream

CASES: dict[str, dict[str, Any]] = {
    "dropout": {},
    "recompute": {"recompute": "all"},
    "two stages": {"n_stages": 2, "seed": 3},
    "segments": {"mode": "ZB", "costs": moe_costs(0.4, 4)},
    "segments, two stages": {
        "mode": "ZBV",
        "costs": moe_costs(0.4, 2),
        "n_stages": 2,
        "seed": 3,
    },
}


def saving(x: Tensor, name: str) -> Tensor:
    """Communicate what it keeps for its backward, on the network's stream as well."""
    return exchange(x * x, name)


def trained(case: str, policy: str, seed: int = 0, **more: Any) -> Outcome:
    simgpu.begin(policy, seed)
    how = CASES[case] | {"device": simgpu.DEVICE} | more
    model = talking(4, dropout=0.3, communicate=saving)
    numbers, state = train(make(model, **how), steps=2)
    return numbers, {name: value.cpu() for name, value in state.items()}


@pytest.mark.parametrize("case", CASES)
def test_turns_have_the_bits_of_a_row_and_no_race(case: str) -> None:
    numbers, state = trained(case, "eager", overlap=False)
    for policy, seed in (("lazy", 0), ("random", 1)):
        in_turns = trained(case, policy, seed)
        assert simgpu.reports() == [], (policy, seed)
        assert in_turns[0] == numbers
        assert_same(in_turns[1], state)


def nothing(*_: Any) -> None:
    """Leave a wait out."""


def begin_without_waiting(self: NetworkStream, tensors: Any) -> None:
    with self.running():
        network = torch.accelerator.current_stream(simgpu.DEVICE)
    streams._record(tensors, network)


def end_without_waiting(self: NetworkStream, event: Any, tensors: Any) -> None:
    streams._record(tensors, torch.accelerator.current_stream(simgpu.DEVICE))


MISTAKES: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "communication does not wait": (NetworkStream, "begin", begin_without_waiting),
    "computing does not wait": (NetworkStream, "end", end_without_waiting),
    "tensors are not recorded": (streams, "_record", nothing),
}


@pytest.mark.parametrize("case", ["dropout", "segments"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wait_that_is_left_out_is_reported(
    mistake: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*MISTAKES[mistake])
    with suppress(RuntimeError):  # numbers may be so wrong that the step fails
        trained(case, "random", 1)
    assert simgpu.reports()


@pytest.mark.parametrize("case", ["dropout", "segments"])
def test_what_communicates_runs_on_a_stream_of_its_own(case: str) -> None:
    """In F and in B, beside others and alone; what computes stays on the caller's."""
    used: dict[str, set[int]] = {"F": set(), "B": set()}
    beside: list[bool] = []
    go_on = OpenPass.go_on

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            used["F"].add(torch.accelerator.current_stream().stream_id)
            return x.flip(0)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            used["B"].add(torch.accelerator.current_stream().stream_id)
            return dy.flip(0)

    def noted(self: OpenPass) -> None:
        beside.append(True)
        go_on(self)

    simgpu.begin("lazy")
    here = torch.accelerator.current_stream().stream_id
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenPass, "go_on", noted)
        model = talking(4, communicate=lambda x, name: Call.apply(x))
        train(make(model, device=simgpu.DEVICE, **CASES[case]), steps=2)
    assert beside
    assert used["F"] == used["B"] and len(used["F"]) == 1 and here not in used["F"]


class Sleeping(torch.autograd.Function):
    """Sleeps, which a lower bound can tell on a busy machine too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        time.sleep(SLEEP_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        time.sleep(SLEEP_S)
        return dy.clone(), None


SLEEP_S = 5e-3


def test_a_profile_times_what_communicates_by_events_of_the_stages_stream() -> None:
    simgpu.begin("eager")
    model = talking(2, communicate=lambda x, name: Sleeping.apply(x, name))
    pipeline = make(model, device=simgpu.DEVICE)
    x = torch.randn(2 * N_MICROBATCHES, WIDTH)
    layers = pipeline.profile(x, x, rounds=2, memory=False).layers
    pipeline.close()
    assert simgpu.reports() == []
    for layer in (0, 1):
        for kind in (PassKind.F, PassKind.B):
            parts = layers.parts_of(layer)
            assert parts.on_lane(kind, Lane.NETWORK) > SLEEP_S * 1e3, "of two"
