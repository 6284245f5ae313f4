"""Layers take turns in two buffers, which nobody reads or writes out of turn."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from mesh_runs import (
    WIDTH,
    Block,
    Collected,
    Found,
    adamw,
    breaking,
    loss_fn,
    train_all,
)
from pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, share_comm_ctx

import zbpp
from zbpp import RequestError
from zbpp.checkpoint.tensors import whole as gathered
from zbpp.memory.tracker import StorageTracker
from zbpp.runtime.parallel.buffers import (
    AlternatingBuffers,
    GradientTurn,
    OrderError,
    ParameterTurn,
)
from zbpp.runtime.support.fsdp_buffers import BufferedUnit, _Name

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


def layers_of(depth: int) -> list[nn.Module]:
    """Layers, the second the largest; W of the third asks for a weight that is gone."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [
        Block(WIDTH, 2 * WIDTH * (1 + (i == 1)), checkpointed=False)
        for i in range(depth)
    ]
    layers[2] = _Convolution()
    return layers


def places(
    depth: int, *, alternating: bool = True
) -> tuple[list[int], int, int, dict[str, int], float]:
    """Of the second step of one stage: where its layers are, how often gathered.

    Returns:
        Address of each layer's first weight in its forwards; bytes of all memory that
        weights were in; those of the buffers; collectives; the loss.
    """
    layers = layers_of(depth)
    at: dict[int, set[int]] = {}
    memory: dict[int, int] = {}

    def see(i: int, layer: nn.Module, _: Any) -> None:
        at.setdefault(i, set()).add(layer.norm.weight.data_ptr())  # type: ignore
        for p in layer.parameters():
            storage = p.untyped_storage()
            memory[storage._cdata] = storage.nbytes()

    with flat_pipeline(
        layers,
        loss_fn=loss_fn,
        optimizer=adamw,
        schedule="ZBH1",
        n_microbatches=2,
        mesh=zbpp.mesh(stages=1, data_parallel=2),
        shard="parameters",
        alternating_buffers=alternating,
    ) as pipeline:
        for i, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(see, i))
        x = torch.randn(4, WIDTH)
        pipeline.step(x, x)
        with Collected() as collected:
            loss = pipeline.step(x, x).loss
        pipeline.synchronize()
        (executor,) = pipeline.stages.executors.values()
        held = getattr(executor.collectives, "buffers", None)
    if alternating:
        assert all(len(seen) == 1 for seen in at.values())
    firsts = [min(at[i]) for i in range(depth)]
    n_bytes = held.n_bytes if held else 0
    return firsts, sum(memory.values()), n_bytes, dict(collected.counts), loss


class _Taken(StorageTracker):
    """Counts storages of so many bytes or more, but those of names and of gloo."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self._least = least

    def size_of(self, storage: torch.UntypedStorage) -> int:
        n_bytes = super().size_of(storage)
        return n_bytes if n_bytes >= self._least else 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.split.Tensor:
            return super().__torch_dispatch__(func, types, args, kwargs)
        parts = func(*args, **(kwargs or {}))
        self.ignore(parts)  # of copies that gloo makes of what it sums
        return parts

    def _note(self, tensor: torch.Tensor, least: int = 0) -> None:
        if not isinstance(tensor, _Name):
            super()._note(tensor, least)


def alike(depth: int) -> tuple[list[nn.Module], torch.Tensor, int]:
    """Layers, the samples of a replica's two micro-batches, and bytes of a layer."""
    torch.manual_seed(0)
    width = 64
    layers = [nn.Linear(width, width, bias=False) for _ in range(depth)]
    return [*layers], torch.randn(2, width), 4 * width * width


def taken(depth: int, mode: str, broken: str | None = None) -> tuple[float, float]:
    """Of a step of one stage, in layers: what is whole, and all, at its most.

    The layers are alike; what is whole has the size of one, or more: it is gathered, or
    a gradient, and no part, nor an activation. Buffers are not counted.
    """
    layers, x, n_bytes = alike(depth)
    with (
        breaking(broken),
        flat_pipeline(
            layers,
            loss_fn=loss_fn,
            optimizer=None,
            schedule=mode,
            n_microbatches=2,
            mesh=zbpp.mesh(stages=1, data_parallel=2),
            shard="parameters",
            alternating_buffers=True,
        ) as pipeline,
    ):
        (executor,) = pipeline.stages.executors.values()
        buffers = executor.collectives.buffers
        assert buffers is not None
        pipeline.step(x, x)
        for layer in layers:
            layer.zero_grad()
        trackers = whole, most = _Taken(n_bytes), _Taken()
        for tracker in trackers:
            with tracker:
                tracker.ignore([*buffers._parameters, *buffers._gradients])
                tracker.ignore(p for layer in layers for p in layer.parameters())
        with whole, most:
            pipeline.step(x, x)
    return whole.most / n_bytes, most.most / n_bytes


def taken_all(cases: list[tuple[Any, ...]]) -> list[tuple[float, float]]:
    """`taken` of several cases."""
    return [taken(*case) for case in cases]


class _Convolution(nn.Module):
    """Norm and convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.convolution(self.norm(x)[:, None])
        return x + made.sum(1)


def places_all(cases: list[dict[str, Any]]) -> list[Any]:
    """`places` of several cases."""
    return [places(**case) for case in cases]


def moves() -> str:
    """Gathers, begins and releases of four layers in F and B, in their order."""
    seen: list[str] = []
    names = ("gather", "begin", "release")
    whole = {name: getattr(ParameterTurn, name) for name in names}

    def noted(name: str) -> Callable[[ParameterTurn, str], None]:
        def move(turn: ParameterTurn, layer: str) -> None:
            seen.append(f"{name[0]}{layer[-1]}")
            whole[name](turn, layer)

        return move

    try:
        for name in names:
            setattr(ParameterTurn, name, noted(name))
        _broken("poison")
    finally:
        for name in names:
            setattr(ParameterTurn, name, whole[name])
    return " ".join(seen)


def broken_all(ways: list[str]) -> list[str]:
    """The error, or else the norm of gradients, with buffers that are broken so."""
    return [_broken(way) for way in ways]


def _broken(way: str) -> str:
    torch.manual_seed(0)
    layers = [Block(WIDTH, WIDTH, checkpointed=False) for _ in range(4)]
    mesh = init_device_mesh("cpu", (2,))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    share_comm_ctx(layers)  # type: ignore[arg-type]
    units = [BufferedUnit(layer) for layer in layers]
    for unit in units:
        unit.begin(keeps=False)
        unit.module.unshard()
        unit.module.reshard()
    named = list(enumerate(units))
    with breaking(way):
        AlternatingBuffers({1: named})
        try:
            nn.Sequential(*layers)(torch.ones(1, WIDTH)).sum().backward()
            for unit in reversed(units):
                unit.reduce()
            for unit in units:
                unit.wait()
        except OrderError as error:
            return str(error)
    gradients = [gathered(p.grad) for layer in layers for p in layer.parameters()]
    return str(float(torch.stack([x.norm() for x in gradients]).norm()))


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
    """All but parts and activations is flat in depth."""
    cases = [(4, "ZBH1"), (16, "ZBH1"), (8, "1F1B")]
    for *found, (late, _) in pool.run(taken_all, 2, [*cases, (4, "ZBH1", "late")]):
        for (depth, _), (whole, most) in zip(cases, found, strict=True):
            assert whole == 1  # beside those in buffers
            parts, activations = depth / 2, 0.03 * depth
            generators = 0.6  # their states, and the digest of the batch
            assert 2 <= most - parts <= 2 + activations + generators
        assert late == 4  # where all of a W are kept


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
