"""Scenarios of torch's own tests of composability, for this pipeline.

Eight layers of two Linears of width 10, 2 stages x 2 replicas, 8 micro-batches of one
sample, the sum of the outputs as loss; each replica steps on its own share of the
batch. The reference is the same model without a pipeline, wrapped in the same way on
the same replicas.
"""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import zbpp

WIDTH, N_LAYERS, N_MICROBATCHES, STEPS, CLIP = 10, 8, 8, 4, 0.5

HOWS = ("replicate", "plain", "bf16", "resharded", "tensor parallel")


class Perceptron(nn.Module):
    """Two Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def summed(y: Tensor, _: Tensor) -> Tensor:
    return y.float().sum()


def wrap(layers: list[nn.Module], how: str, mesh: Any) -> None:
    """Wrap every layer, as a user does."""
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    policy = half if how == "bf16" else MixedPrecisionPolicy()
    for layer in layers:
        if how == "replicate":
            replicate(layer, mesh=mesh["dp"])
        elif how == "tensor parallel":
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
        else:
            is_resharded = how == "resharded"
            fully_shard(
                layer,
                mesh=mesh["dp"],
                mp_policy=policy,
                reshard_after_forward=is_resharded,
            )


def batch(step: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.rand(N_MICROBATCHES, WIDTH, generator=generator)


def piped(layers: list[nn.Module], mode: str, mesh: Any, optimizer: Any) -> Any:
    """Losses, norms, whole parameters after the steps."""
    clip = None if optimizer is torch.optim.SGD else CLIP
    with zbpp.Pipeline(
        layers,
        loss_fn=summed,
        optimizer=partial(optimizer, lr=0.1),
        schedule=mode,
        n_microbatches=N_MICROBATCHES,
        clip_grad_norm=clip,
        mesh=mesh,
    ) as pipeline:
        found = []
        for step in range(1 if clip is None else STEPS):
            x = batch(step, pipeline.place.replica)
            result = pipeline.step(x, x)
            found.append((result.loss, result.grad_norm))
        return found, parameters_of(pipeline.named_layers())


def plain(model: nn.Module, replica: int, optimizer: Any) -> Any:
    """The same without a pipeline; torch sums over the replicas."""
    own = optimizer(model.parameters(), lr=0.1)
    found = []
    for step in range(1 if optimizer is torch.optim.SGD else STEPS):
        losses = []
        for i, x in enumerate(batch(step, replica).split(1)):
            for layer in model.children():
                if hasattr(layer, "set_requires_gradient_sync"):
                    layer.set_requires_gradient_sync(i == N_MICROBATCHES - 1)
            loss = summed(model(x), x)
            (loss / N_MICROBATCHES).backward()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        torch.distributed.all_reduce(mean)  # all ranks run it: of each replica, two
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        norm = total.full_tensor() if isinstance(total, DTensor) else total
        if optimizer is not torch.optim.SGD:
            nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, total)
        found.append((float(mean) / torch.distributed.get_world_size(), float(norm)))
        own.step()
        own.zero_grad()
    named = ((f"layers.{i}", layer) for i, layer in model.named_children())
    return found, parameters_of(named)


def parameters_of(layers: Iterable[tuple[str, nn.Module]]) -> dict[str, Tensor]:
    """Whole parameters, as the optimizer has them."""
    found = {}
    for name, layer in layers:
        if hasattr(layer, "reshard"):
            layer.reshard()
        for own, p in layer.named_parameters(prefix=name):
            value = p.full_tensor() if isinstance(p, DTensor) else p
            found[own] = value.detach().clone()
    return found


def compare(modes: list[str], hows: list[str]) -> list[tuple[Any, Any]]:
    """Each mode beside the reference, by way of wrapping: SGD, then AdamW."""
    found = []
    for how in hows:
        is_cut = how == "tensor parallel"
        mesh = zbpp.mesh(
            stages=2, data_parallel=1 + (not is_cut), tensor_parallel=1 + is_cut
        )
        for optimizer in (torch.optim.SGD, torch.optim.AdamW):
            torch.manual_seed(0)
            first: list[nn.Module] = [Perceptron() for _ in range(N_LAYERS)]
            others = copy.deepcopy(first)
            wrap(others, how, mesh)
            replica = 0 if is_cut else mesh.get_local_rank("dp")
            expected = plain(nn.Sequential(*others), replica, optimizer)
            for mode in modes:
                layers = copy.deepcopy(first)
                wrap(layers, how, mesh)
                found.append((piped(layers, mode, mesh, optimizer), expected))
    return found
