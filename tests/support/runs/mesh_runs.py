"""Trainings on a mesh, and the same in one process, for tests."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from flat import flat_pipeline
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import zbpp
from zbpp import Costs, diagnostics
from zbpp.checkpoint.tensors import whole as gathered
from zbpp.runtime.optim.decision import clip_factor
from zbpp.runtime.parallel import buffers
from zbpp.runtime.parallel.buffers import GradientTurn, Turn
from zbpp.runtime.parallel.mesh import shard_mesh
from zbpp.runtime.parallel.progress import LayerSums
from zbpp.runtime.support import fsdp

WIDTH, N_LAYERS, SAMPLES, N_MICROBATCHES = 8, 8, 16, 8


Found = SimpleNamespace
"""Outcome of a training on a rank: results, whole parameters, rollbacks, validation."""


class Block(nn.Module):
    """Norm, two Linears, a skip; the inner part may be checkpointed."""

    def __init__(self, width: int, hidden: int, *, checkpointed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self._checkpointed = checkpointed

    def _inner(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self._checkpointed:
            return x + checkpoint(self._inner, x, use_reentrant=False)
        return x + self._inner(x)


def layers(
    *, checkpointed: bool = False, large: bool = False, tied: bool = False
) -> list[nn.Module]:
    """The layers, the same on every process.

    With ``large`` a weight has 8 MiB, with ``tied`` first and last layer share theirs.
    """
    torch.manual_seed(0)
    hidden = 2 * WIDTH
    made: list[nn.Module] = [
        Block(WIDTH, hidden, checkpointed=checkpointed) for _ in range(N_LAYERS - 1)
    ]
    if large:
        made[2] = Block(WIDTH, 2**18, checkpointed=checkpointed)
    last = nn.Linear(WIDTH, WIDTH)
    if tied:
        made[0] = nn.Linear(WIDTH, WIDTH)
        last.weight = made[0].weight
    return [*made, last]


def batch(step: int, samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(2, samples, WIDTH, generator=generator)
    return x, 3.0 * y if step % 3 == 2 else y


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


def adamw(parameters: list[nn.Parameter], lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


def _rate(large: bool) -> float:
    """A wide layer's steps add up."""
    return 1e-5 if large else 1e-2


def _clip(large: bool) -> float:
    """Clips some steps, and not others."""
    return 50.0 if large else 0.9


def cut_over(made: list[nn.Module], mesh: Any) -> list[nn.Module]:
    """Deal the two Linears of each block to the processes of a tensor-parallel mesh."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    blocks = [isinstance(layer, Block) for layer in made]
    return [
        parallelize_module(layer, mesh, plan) if is_block else layer
        for layer, is_block in zip(made, blocks, strict=True)
    ]


def wrapped(
    made: list[nn.Module], how: str, mesh: Any, *, bf16: bool = False
) -> list[nn.Module]:
    """Wrap every layer: ``replicate``, ``kept``, ``resharded``; else leave it."""
    if how in ("bare", "optimizer", "gradients", "parameters"):
        return made
    for layer in made:
        if how == "replicate":
            replicate(layer, mesh=mesh)
        else:
            policy = MixedPrecisionPolicy()
            if bf16:
                policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            fully_shard(
                layer,
                mesh=mesh,
                reshard_after_forward=how == "resharded",
                mp_policy=policy,
            )
    return made


def train(
    mode: str,
    how: str,
    *,
    first: int = 0,
    steps: int = 6,
    folder: str = "",
    stages: int = 2,
    data_parallel: int = 2,
    tensor_parallel: int = 1,
    replicate: int = 1,
    bf16: bool = False,
    checkpointed: bool = False,
    large: bool = False,
    tied: bool = False,
    switches_at: int | None = None,
    broken: str | None = None,
    tp: Any = None,
    **more: Any,
) -> Found:
    """Train on a mesh, with something ``broken`` or whole.

    A run with a ``folder`` saves at its end; one that does not begin at the first step
    goes on from what is there. Blocks are dealt over ``tp``, if it is given.
    """
    mesh = None
    made = layers(checkpointed=checkpointed, large=large, tied=tied)
    if stages * data_parallel * tensor_parallel > 1:
        mesh = zbpp.mesh(
            stages=stages,
            data_parallel=data_parallel,
            replicate=replicate,
            tensor_parallel=tensor_parallel,
        )
        if tensor_parallel > 1:
            made = cut_over(made, tp or mesh["tp"])
        made = wrapped(made, how, shard_mesh(mesh), bf16=bf16)
    shard = how if how in ("optimizer", "gradients", "parameters") else "none"
    with (
        breaking(broken),
        flat_pipeline(
            made,
            loss_fn=loss_fn,
            optimizer=partial(adamw, lr=_rate(large)),
            schedule=mode,
            n_microbatches=N_MICROBATCHES // data_parallel,
            clip_grad_norm=_clip(large),
            mesh=mesh,
            n_stages=1 if mesh is None else None,
            shard=shard,
            post_validation=mode not in ("1F1B", "VPP") or None,
            **more,
        ) as pipeline,
    ):
        n = SAMPLES // data_parallel
        own = slice(n * pipeline.place.replica, n * (pipeline.place.replica + 1))
        results = []
        if first:
            pipeline.load(folder)
        for step in range(first, steps):
            if step == switches_at:
                n, m = pipeline.schedule.n_stages, pipeline.n_microbatches
                costs = Costs(f=1, b=3, w=2)
                pipeline.switch(
                    zbpp.plan(mode, n_stages=n, n_microbatches=m, costs=costs)
                )
            x, y = batch(step)
            results.append(pipeline.step(x[own], y[own]))
        if folder and not first:
            pipeline.save(folder, wait=True)
        x, y = batch(99)
        validation = pipeline.evaluate(x[own], y[own])
        found = [(one.loss, one.grad_norm) for one in results]
        parameters = whole(pipeline)
        rollbacks = sum(one.rollbacks for one in results)
        where = diagnostics.split_report(pipeline)
        return Found(
            waits={name for name, text in where.items() if text == "W"},
            results=found,
            parameters=parameters,
            rollbacks=rollbacks,
            validation=validation,
        )


def whole(pipeline: zbpp.Pipeline) -> dict[str, Tensor]:
    """Copies of this rank's parameters, gathered."""
    found = {}
    for name, layer in pipeline.named_layers():
        for unit in fsdp.units_in(layer):
            unit.unshard()
        for own, p in layer.named_parameters(prefix=name):
            found[own] = gathered(p).detach().clone()
        for unit in fsdp.units_in(layer):
            unit.reshard()
    return found


class Collected(TorchDispatchMode):
    """Counts collectives of torch's own groups, and their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_")
            self.counts[name] += 1
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            self.bytes[name] += max(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


def collect(
    how: str, mode: str, broken: str | None = None
) -> tuple[dict[str, int], dict[str, int], list[tuple[str, float, float]]]:
    """Collectives of a rank's second step, their bytes, its jobs with their times."""
    mesh = zbpp.mesh(stages=2, data_parallel=2)
    made = wrapped(layers(), how, mesh["dp"])
    with (
        breaking(broken),
        zbpp.Pipeline(
            made,
            loss_fn=loss_fn,
            optimizer=adamw,
            schedule=mode,
            n_microbatches=8,
            mesh=mesh,
        ) as pipeline,
    ):
        x, y = (part[:8] for part in batch(0))
        pipeline.step(x, y)
        with Collected() as collected:
            pipeline.step(x, y)
        pipeline.synchronize()
        timeline = diagnostics.timeline(pipeline)
        (stage,) = pipeline.stages.executors
        slots = (*timeline.rows[stage], *timeline.collectives[stage])
        jobs = [(str(slot.job), slot.start, slot.end) for slot in slots]
    return dict(collected.counts), dict(collected.bytes), jobs


def collect_all(cases: list[tuple[str, ...]]) -> list[Any]:
    """`collect` of several cases."""
    return [collect(*case) for case in cases]


def train_plainly(
    steps: int = 6, *, large: bool = False, tied: bool = False
) -> tuple[list[tuple[float, float]], dict[str, Tensor], float]:
    """The same in one process, by a plain loop."""
    made = layers(large=large, tied=tied)
    model = nn.Sequential(*made)
    optimizer = adamw(list(model.parameters()), _rate(large))
    results = []
    for step in range(steps):
        x, y = (part.tensor_split(N_MICROBATCHES) for part in batch(step))
        losses = []
        for i in range(N_MICROBATCHES):
            loss = loss_fn(model(x[i]), y[i])
            (loss / N_MICROBATCHES).backward()
            losses.append(loss.detach())
        squares = [p.grad.double().square().sum() for p in model.parameters()]
        norm = torch.stack(squares).sum().sqrt()
        for p in model.parameters():
            p.grad *= clip_factor(float(norm), _clip(large))
        results.append((float(torch.stack(losses).mean()), float(norm)))
        optimizer.step()
        optimizer.zero_grad()
    x, y = batch(99)
    with torch.no_grad():
        validation = float(loss_fn(model(x), y))
    names = {f"layers.{n}": p.detach() for n, p in model.named_parameters()}
    return results, names, validation


def train_all(cases: list[tuple[str, str, dict[str, Any]]]) -> list[Found]:
    """Trainings one after the other: mode, wrapping, further arguments."""
    return [train(mode, how, **more) for mode, how, more in cases]


def _with_nans(method: str) -> tuple[type, str, Any]:
    """What a method of `Turn` has been called for is not a number from then on."""
    whole = getattr(Turn, method)

    def poisoned(turn: Any, *args: Any, **named: Any) -> Any:
        of_gradients = method == "finish"
        ends = not of_gradients or turn.is_summing
        result = whole(turn, *args, **named)
        if ends:
            turn.buffers[of_gradients].view(torch.float32).fill_(torch.nan)
        return result

    return Turn, method, poisoned


def _chain_two_ahead(units: Any, **_: Any) -> None:
    for unit, after in zip(units, units[2:], strict=False):
        unit.gather_ahead(after, None)


def _nothing(*_: Any) -> None:
    pass


OF_BUFFERS: dict[str, list[tuple[Any, str, Any]]] = {
    "poison": [_with_nans("release"), _with_nans("finish")],
    "released early": [_with_nans("begin")],
    "two ahead": [(buffers, "_chain", _chain_two_ahead)],
    "never freed": [(Turn, "release", _nothing)],
    "unwaited": [(Turn, "arrived", _nothing)],
    "summed early": [(GradientTurn, "filled", _nothing)],
    "never summed": [(GradientTurn, "release", _nothing)],
    "unwaited sums": [(Turn, "finish", _nothing)],
    "late": [(LayerSums, "done", lambda *_: sys.maxsize)],
}
"""Owner, name and stand-in of what is patched; ``poison`` breaks nothing."""


@contextmanager
def breaking(what: str | None) -> Iterator[None]:
    """Take something out of this process meanwhile, as a negative control."""
    with ExitStack() as stack:
        for owner, name, value in OF_BUFFERS[what] if what else ():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield
