"""Layers take turns in two buffers, which nobody reads or writes out of turn."""

import re
from typing import Any

import pytest
import torch
from buffer_runs import alike, broken_all, moves, places_all, taken_all
from flat import flat_pipeline
from mesh_runs import WIDTH, Found, loss_fn, train_all
from pool import Pool

from zbpp import RequestError
from zbpp.memory.api import estimate
from zbpp.runtime.parallel.buffers import GradientTurn, OrderError, ParameterTurn

CPU = torch.device("cpu")
BLOCK = 2 * 64 + 4 * (2 * WIDTH + 1) * 4 * WIDTH
"""Bytes of the largest layer, those of its norm rounded up to 64 each."""


USED = [("gather", 0), ("arrived", 0), ("begin", 0)]
OUT_OF_TURN = [
    (1, ParameterTurn, [*USED, ("gather", 2)]),
    (2, ParameterTurn, [("gather", 2), ("begin", 2)]),
    (2, ParameterTurn, [*USED, ("check", 2)]),
    (3, GradientTurn, [("fill", 2), ("reduce", 2)]),
    (4, GradientTurn, [("fill", 0), ("filled", 0), ("reduce", 0), ("fill", 2)]),
]


@pytest.mark.parametrize(("condition", "kind", "moves"), OUT_OF_TURN)
def test_each_condition_is_checked(
    condition: int, kind: Any, moves: list[tuple[str, int]]
) -> None:
    turn = kind()
    *before, (last, layer) = [(move, f"layers.{i}") for move, i in moves]
    for move, owner in before:
        getattr(turn, move)(owner)
    words = rf"^layers\.2: .* by layers\.[02]\); condition {condition} of alternating"
    with pytest.raises(OrderError, match=words):
        getattr(turn, last)(layer)


def test_turns_in_order_pass() -> None:
    parameters, gradients = ParameterTurn(), GradientTurn()
    for layer in ("layers.0", "layers.2", "layers.2"):
        for move in ("gather", "arrived", "begin", "check", "release"):
            getattr(parameters, move)(layer)
        for move in ("fill", "filled", "reduce", "release"):
            getattr(gradients, move)(layer)
    parameters.gather("layers.4")
    parameters.cancel()
    parameters.gather("layers.0")


@pytest.mark.slow
@pytest.mark.dist
def test_memory_is_flat_in_depth(pool: Pool) -> None:
    depths = (4, 8)
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
        assert n_bytes > 4 * BLOCK
        assert loss == plain_loss
        assert plain_counts["allgather_base"] == 2 * 2 * 8  # F and B of m = 2
        assert sorted(counts.values()) == sorted(plain_counts.values())


@pytest.mark.dist
def test_one_gradient_at_a_time_is_whole(pool: Pool) -> None:
    """All but parts and activations is flat in depth, as estimated."""
    cases = [(4, "ZBH1"), (16, "ZBH1"), (8, "1F1B")]
    for *found, (late, _) in pool.run(taken_all, 2, [*cases, (4, "ZBH1", "late")]):
        for (depth, mode), (whole, most) in zip(cases, found, strict=True):
            assert whole == 1  # beside those in buffers
            parts, activations = depth / 2, 0.03 * depth
            assert 2 <= most - parts <= 2 + activations
            assert most == pytest.approx(_estimated(depth, mode), rel=0.01)
        assert late == 4  # where all of a W are kept


def _estimated(depth: int, mode: str) -> float:
    """Peak of a stage, less what is there all the time, in layers."""
    layers, x, n_bytes = alike(depth)
    found = estimate(
        layers,
        (x[:1], x[:1]),
        loss_fn,
        n_stages=1,
        n_microbatches=2,
        modes=[mode],
        optimizer=None,
        data_parallel=2,
        shard="parameters",
        alternating_buffers=True,
    )
    (stage,) = found.modes[mode]
    assert stage.gathered_peak == 0
    assert stage.buffers == 4 * n_bytes
    fixed = stage.parameters + stage.buffers + stage.batch
    return (stage.peak - fixed) / n_bytes


@pytest.mark.slow
@pytest.mark.dist
def test_sums_of_each_micro_batch_have_the_same_bits(pool: Pool) -> None:
    """In all modes, though what buffers give back is NaN."""
    assert_alike(pool, [("1F1B", {"steps": 3}), ("ZBV", {"steps": 3})])


@pytest.mark.slow
@pytest.mark.dist
def test_they_have_in_other_modes_and_without_buffers(pool: Pool) -> None:
    again = {"steps": 3, "checkpointed": True}
    assert_alike(pool, [("VHalf", again), ("1F1B", again)], without=("ZBV", again))


def assert_alike(
    pool: Pool, cases: list[Any], without: tuple[str, dict[str, Any]] | None = None
) -> None:
    """The same losses, norms and parameters in all cases, with their buffers poisoned.

    Args:
        pool: of processes.
        cases: modes, and how to train.
        without: one more, without buffers.
    """
    poisoned = {"alternating_buffers": True, "broken": "poison"}
    runs = [(mode, "parameters", {**how, **poisoned}) for mode, how in cases]
    runs += [(mode, "parameters", how) for mode, how in ([without] if without else [])]
    found = pool.run(train_all, 4, runs)
    first, *others = [_together(list(at_rank)) for at_rank in zip(*found, strict=True)]
    for (mode, *_), one in zip(runs[1:], others, strict=True):
        assert_same(one, first)
        assert one.rollbacks == (0 if mode == "1F1B" else 2)


def _together(at_rank: list[Found]) -> Found:
    """The answers of all ranks, with the parameters of all."""
    for one in at_rank[1:]:
        assert one.results == at_rank[0].results
        assert one.validation == at_rank[0].validation
        for name in one.parameters.keys() & at_rank[0].parameters.keys():
            assert torch.equal(one.parameters[name], at_rank[0].parameters[name])
    parameters = {n: p for one in at_rank for n, p in one.parameters.items()}
    return Found(**{**vars(at_rank[0]), "parameters": parameters})


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
    "unwaited sums": r"layers\.\d: its gradients are copied .* condition 4 of",
    "never summed": r"layers\.\d: its gradients are copied .* condition 4 of",
}


@pytest.mark.dist
def test_what_is_out_of_turn_shows(pool: Pool) -> None:
    for found in pool.run(broken_all, 2, [*BREAKS]):
        for broken, one in zip(BREAKS, found, strict=True):
            assert re.match(BREAKS[broken], one), f"{broken}: {one}"


def test_only_layers_of_passes_alternate() -> None:
    with pytest.raises(RequestError, match="shard='parameters'"):
        flat_pipeline(
            [torch.nn.Linear(2, 2)],
            loss_fn=torch.nn.functional.mse_loss,
            optimizer=None,
            n_microbatches=1,
            alternating_buffers=True,
        )
