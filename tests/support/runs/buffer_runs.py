"""Where a stage's layers are gathered, and how often, for tests."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from flat import flat_pipeline
from mesh_runs import WIDTH, Block, Collected, adamw, breaking, loss_fn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, share_comm_ctx

import zbpp
from zbpp.checkpoint.tensors import whole as gathered
from zbpp.memory.tracker import StorageTracker
from zbpp.runtime.parallel.buffers import (
    AlternatingBuffers,
    OrderError,
    ParameterTurn,
)
from zbpp.runtime.support.fsdp_buffers import BufferedUnit, _Name

__all__ = [
    "alike",
    "broken_all",
    "layers_of",
    "moves",
    "places",
    "places_all",
    "taken_all",
]


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
