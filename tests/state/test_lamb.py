"""LAMB, an optimizer that mixes the numbers of a parameter: on stages, and on shards.

Layers have 7 rows, which two processes cannot share evenly.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from small import make, refusal
from torch import Tensor, nn

import zbpp

needs_lamb = pytest.mark.needs("pytorch_optimizer")

N_STEPS, WIDTH = 6, 7
CLIP = 0.05  # every step is clipped
OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
Parameters = dict[str, Tensor]


def lamb(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    from pytorch_optimizer import Lamb

    return Lamb(parameters, **OPTIONS | options)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*blocks).double()


def batch(step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 8, WIDTH, generator=generator, dtype=torch.float64)


def plain(clip: float | None, **options: Any) -> Parameters:
    model = layers()
    optimizer = lamb(model.parameters(), **options)
    for step in range(N_STEPS):
        x, y = batch(step)
        nn.functional.mse_loss(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def trained(pipeline: zbpp.Pipeline, n_rollbacks: int, steps: range) -> Parameters:
    place = pipeline.place
    for step in steps:
        share = [z.chunk(place.n_replicas)[place.replica] for z in batch(step)]
        assert pipeline.step(*share).rollbacks == n_rollbacks
    pipeline.synchronize()
    whole = {}
    for name, p in pipeline.named_parameters():
        p = getattr(p, "full_tensor", lambda p=p: p)()
        whole[name] = p.detach().clone()
    return whole


def error(found: Parameters, expected: Parameters) -> float:
    return max(float((p - expected[name]).abs().max()) for name, p in found.items())


@needs_lamb
@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize(("mode", "n_stages"), [("1F1B", 1), ("ZBV", 2), ("ZBH2", 4)])
def test_lamb_equals_a_plain_loop(mode: str, n_stages: int, clip: float | None) -> None:
    pipeline = make(
        layers(),
        mode,
        n_stages=n_stages,
        optimizer=lamb,
        clip_grad_norm=clip,
        post_validation=n_stages > 1,
    )
    found = trained(pipeline, int(clip is not None and n_stages > 1), range(N_STEPS))
    assert len(found) == 16 and error(found, plain(clip)) < 1e-9
    # the trust ratios count
    assert error(found, plain(clip, adam=True)) > 1e-3


def on_shards(shard: Any, clip: float | None, folder: str) -> Parameters:
    """Train, with a checkpoint halfway."""
    mesh = zbpp.DataParallel(mesh=zbpp.mesh(stages=2, data_parallel=2), shard=shard)
    build = partial(
        make,
        schedule="ZBV",
        optimizer=lamb,
        clip_grad_norm=clip,
        post_validation=True,
        mesh=mesh,
    )
    first = build(layers())
    n_rollbacks = int(clip is not None)
    trained(first, n_rollbacks, range(3))
    first.save(folder, wait=True)
    first.close()
    with build(layers()) as second:
        second.load(folder)
        return trained(second, n_rollbacks, range(3, N_STEPS))


@needs_lamb
@pytest.mark.dist
@pytest.mark.parametrize(
    ("shard", "clip"),
    [
        ("optimizer", CLIP),
        pytest.param("parameters", None, marks=pytest.mark.slow),
        pytest.param("gradients", CLIP, marks=pytest.mark.slow),
    ],
)
def test_norms_are_of_whole_parameters_on_shards(
    pool: Pool, shard: str, clip: float | None, tmp_path: Path
) -> None:
    ranks = pool.run(on_shards, 4, shard, clip, str(tmp_path))
    for found in ranks:
        assert len(found) == 8 and error(found, plain(clip)) < 1e-9
    assert error(ranks[0], plain(clip, adam=True)) > 1e-3


class Clipping(torch.optim.SGD):
    """Clips as timm's LAMB does, by default."""

    def __init__(self, parameters: Any, norm: float | None = 1.0) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["max_grad_norm"] = norm


@pytest.mark.parametrize(
    ("clips", "harmless"),
    [
        (Clipping, partial(Clipping, norm=None)),
        pytest.param(
            partial(lamb, pre_norm=True),
            partial(lamb, pre_norm=True, max_grad_norm=0.0),
            marks=needs_lamb,
        ),
    ],
)
def test_clipping_by_the_norm_of_one_stage_is_refused(
    clips: Any, harmless: Any
) -> None:
    text = refusal(make, layers(), optimizer=clips)
    assert "max_grad_norm=1.0, which clips by the norm of one stage" in text
    assert "write zbpp.Pipeline(..., clip_grad_norm=1.0)" in text
    make(layers(), optimizer=harmless)
