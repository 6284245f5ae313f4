"""Wrapped stages train as the same model does that is wrapped and not cut.

As in torch's own tests of composability: eight layers of two Linears of width 10, 2
stages x 2 replicas, 8 micro-batches of one sample, the sum of the outputs as loss; each
replica steps on its own share of the batch.
"""

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
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
MODES = {
    "replicate": "VPP",
    "plain": "ZBH1",
    "bf16": "ZBV",
    "resharded": "1F1B",
    "tensor parallel": "ZBV",
}
"""By how layers are wrapped."""


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


def compare(mode: str, how: str) -> list[tuple[Any, Any]]:
    """A pipeline beside the reference, by SGD, then by AdamW."""
    found = []
    is_cut = how == "tensor parallel"
    mesh = zbpp.mesh(
        stages=2, data_parallel=1 + (not is_cut), tensor_parallel=1 + is_cut
    )
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        torch.manual_seed(0)
        layers: list[nn.Module] = [Perceptron() for _ in range(N_LAYERS)]
        others = copy.deepcopy(layers)
        wrap(others, how, mesh)
        replica = 0 if is_cut else mesh.get_local_rank("dp")
        expected = plain(nn.Sequential(*others), replica, optimizer)
        wrap(layers, how, mesh)
        found.append((piped(layers, mode, mesh, optimizer), expected))
    return found


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("how", MODES)
def test_a_pipeline_of_wrapped_layers_is_the_wrapped_model(
    how: str, pool: Pool
) -> None:
    rel = 2e-2 if how == "bf16" else 1e-5
    for at_rank in pool.run(compare, 4, MODES[how], how):
        for (results, own), (expected, parameters) in at_rank:
            assert len(results) == len(expected)
            for got, want in zip(results, expected, strict=True):
                assert got == pytest.approx(want, rel=rel)
            for name, value in own.items():
                torch.testing.assert_close(value, parameters[name], rtol=rel, atol=rel)
