"""Layers take turns in two buffers, which nobody reads or writes out of turn."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from buffer_runs import broken_all, layers_of, moves, places_all
from mesh_runs import WIDTH, Found, loss_fn, train_all
from pool import Pool

import zbpp
from zbpp import RequestError
from zbpp.memory.api import estimate
from zbpp.runtime.parallel.turns import GradientTurn, OrderError, ParameterTurn

CPU = torch.device("cpu")
BLOCK = 2 * 64 + 4 * (2 * WIDTH + 1) * 4 * WIDTH
"""Bytes of the largest layer, those of its norm rounded up to 64 each."""


def _gathered_twice() -> None:
    turn = ParameterTurn(CPU)
    turn.gather("layers.0")
    turn.arrived("layers.0")
    turn.begin("layers.0")
    turn.gather("layers.2")


def _begun_unwaited() -> None:
    turn = ParameterTurn(CPU)
    turn.gather("layers.2")
    turn.begin("layers.2")


def _run_in_anothers() -> None:
    turn = ParameterTurn(CPU)
    turn.gather("layers.0")
    turn.arrived("layers.0")
    turn.begin("layers.0")
    turn.check("layers.2")


def _reduced_unfilled() -> None:
    turn = GradientTurn(CPU)
    turn.fill("layers.2")
    turn.reduce("layers.2")


def _filled_unreduced() -> None:
    turn = GradientTurn(CPU)
    turn.fill("layers.0")
    turn.filled("layers.0")
    turn.reduce("layers.0")
    turn.fill("layers.2")


@pytest.mark.parametrize(
    ("condition", "break_it"),
    [
        (1, _gathered_twice),
        (2, _begun_unwaited),
        (2, _run_in_anothers),
        (3, _reduced_unfilled),
        (4, _filled_unreduced),
    ],
)
def test_each_condition_is_checked(
    condition: int, break_it: Callable[[], None]
) -> None:
    words = rf"^layers\.2: .* by layers\.[02]\); condition {condition} of alternating"
    with pytest.raises(OrderError, match=words):
        break_it()


def test_turns_in_order_pass() -> None:
    parameters, gradients = ParameterTurn(CPU), GradientTurn(CPU)
    for layer in ("layers.0", "layers.2", "layers.2"):
        for move in ("gather", "arrived", "begin", "check", "release"):
            getattr(parameters, move)(layer)
        for move in ("fill", "filled", "reduce", "release"):
            getattr(gradients, move)(layer)
    parameters.gather("layers.4")
    parameters.cancel()
    parameters.gather("layers.0")


@pytest.mark.dist
def test_memory_is_flat_in_depth(pool: Pool) -> None:
    depths = (4, 16)
    cases: list[dict[str, Any]] = [{"depth": depth} for depth in depths]
    cases.append({"depth": depths[-1], "alternating": False})
    for *found, plain in pool.run(places_all, 2, cases):
        for places, n_bytes, held, *_ in found:
            assert places[2:] == places[:-2]
            assert len(set(places)) == 2
            assert n_bytes == 2 * BLOCK
            assert held == 4 * BLOCK  # as much for gradients
        *_, counts, loss = found[-1]
        _, n_bytes, _, plain_counts, plain_loss = plain
        assert n_bytes > 8 * BLOCK
        assert loss == plain_loss
        assert plain_counts["allgather_base"] == 2 * 2 * 16  # F and B of m = 2
        assert sorted(counts.values()) == sorted(plain_counts.values())


@pytest.mark.slow
def test_estimates_count_the_buffers() -> None:
    layers, x = layers_of(3), torch.ones(2, WIDTH)
    of, without = (
        estimate(
            *(layers, (x, x), loss_fn),
            n_stages=1,
            n_microbatches=2,
            modes=["ZBH1"],
            data_parallel=2,
            shard="parameters",
            alternating_buffers=alternating,
        )
        for alternating in (True, False)
    )
    (stage,), (bare,) = of.modes["ZBH1"], without.modes["ZBH1"]
    assert stage.gathered_peak == 0 < bare.gathered_peak
    assert stage.buffers - bare.buffers == 4 * BLOCK


@pytest.mark.dist
def test_what_is_released_is_not_read(pool: Pool) -> None:
    """The same bits as without the buffers, though what they give back is NaN."""
    poisoned = {"alternating_buffers": True, "broken": "poison"}
    cases = [("ZBV", "parameters", {**how, "steps": 3}) for how in ({}, poisoned)]
    for plain, one in pool.run(train_all, 4, cases):
        assert_same(one, plain)
        assert one.rollbacks == 2


@pytest.mark.slow
@pytest.mark.dist
def test_what_is_released_is_not_read_in_other_modes(pool: Pool) -> None:
    poisoned = {"alternating_buffers": True, "broken": "poison"}
    hows = {"1F1B": {"steps": 2}, "ZBH1": {"steps": 3, "checkpointed": True}}
    cases = [
        (mode, "parameters", {**how, **more})
        for mode, how in hows.items()
        for more in ({}, poisoned)
    ]
    for in_order, in_order_too, split, split_too in pool.run(train_all, 4, cases):
        assert_same(in_order_too, in_order)
        assert_same(split_too, split)
        assert split.rollbacks == 2


def assert_same(one: Found, plain: Found) -> None:
    assert one.results == plain.results
    assert one.validation == plain.validation
    for name, value in plain.parameters.items():
        assert torch.equal(one.parameters[name], value), f"{name} differs"


@pytest.mark.dist
def test_each_pass_starts_the_next_ones_gather(pool: Pool) -> None:
    """Gathers, begins, releases of four layers, in F and then in B."""
    assert pool.run(moves, 2) == 2 * [
        "g0 b0 g1 r0 b1 g2 r1 b2 g3 r2 b3 r3 g3 b3 g2 r3 b2 g1 r2 b1 g0 r1 b0 r0"
    ]


BREAKS = {
    "released early": "nan",
    "two ahead": r"layers\.\d: its gather begins .* condition 1 of",
    "never freed": r"layers\.\d: its gather begins .* condition 1 of",
    "unwaited": r"layers\.\d: its pass begins .* condition 2 of",
    "summed early": r"layers\.\d: a sum begins .* condition 3 of",
    "never summed": r"layers\.\d: its gradients are copied .* condition 4 of",
}


@pytest.mark.dist
def test_what_is_out_of_turn_shows(pool: Pool) -> None:
    for found in pool.run(broken_all, 2, [*BREAKS]):
        for broken, one in zip(BREAKS, found, strict=True):
            assert re.match(BREAKS[broken], one), f"{broken}: {one}"


def test_only_layers_of_passes_alternate() -> None:
    with pytest.raises(RequestError, match="shard='parameters'"):
        zbpp.Pipeline(
            [torch.nn.Linear(2, 2)],
            loss_fn=torch.nn.functional.mse_loss,
            optimizer=None,
            n_microbatches=1,
            alternating_buffers=True,
        )
