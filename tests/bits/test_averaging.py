"""Pipelines that are averaged: two of two stages each, unless it is said."""

from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from ranks import end_of
from small import make, refusal
from torch import Tensor, nn

import zbpp
from zbpp.averaging import DiLoCo, Periodic

pytestmark = pytest.mark.dist

WIDTH, SAMPLES = 8, 16
CLIP = 0.05  # every step is clipped, so post-validation rolls each one back
Parameters = dict[str, Tensor]

sgd = partial(torch.optim.SGD, lr=0.2)
adamw = partial(torch.optim.AdamW, lr=0.02)
diloco = DiLoCo(every=3, outer_lr=0.6, outer_momentum=0.8)


def layers(*, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
    if tied:
        blocks[7][0].weight = blocks[0][0].weight
    return nn.Sequential(*blocks).double()


def share(step: int, replica: int, n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    both = torch.randn(2, SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return [z.chunk(n)[replica] for z in both]


def build(
    averaging: Any,
    *,
    n_stages: int = 2,
    n_replicas: int = 2,
    tied: bool = False,
    mode: str = "ZBV",
    optimizer: Any = sgd,
    **settings: Any,
) -> zbpp.Pipeline:
    mesh = zbpp.mesh(stages=n_stages, data_parallel=n_replicas)
    of_pipeline = mesh if averaging is None else mesh["pp"]
    settings |= {"optimizer": optimizer, "n_stages": None}
    model = layers(tied=tied)
    if dist.get_rank():
        nn.init.zeros_(model[0][0].bias)  # the first pipeline's numbers count
    pipeline = make(model, mode, mesh=of_pipeline, **settings)
    if averaging is not None:
        pipeline.average(averaging, mesh["dp"])
    return pipeline


def replica(n_stages: int = 2) -> tuple[int, int]:
    """Number of this process's replica, and of all: ranks of a stage are in a row."""
    n = dist.get_world_size() // n_stages
    return dist.get_rank() % n, n


def go_on(pipeline: zbpp.Pipeline, steps: range, rolls_back: bool = False) -> None:
    for step in steps:
        result = pipeline.step(*share(step, *replica(pipeline.place.n_stages)))
        assert result.rollbacks == int(rolls_back)


def parameters(pipeline: zbpp.Pipeline) -> tuple[int, Parameters]:
    """Number of the replica, and its parameters."""
    named = {name: p.detach().clone() for name, p in pipeline.named_parameters()}
    return replica(pipeline.place.n_stages)[0], named


def train(averaging: Any, n_steps: int, **settings: Any) -> tuple[int, Parameters]:
    rolls_back = bool(settings.get("post_validation"))
    with build(averaging, **settings) as pipeline:
        go_on(pipeline, range(n_steps), rolls_back)
        return parameters(pipeline)


def whole(p: Any) -> Tensor:
    return p.full_tensor().detach()


def by_replica(ranks: list[tuple[int, Parameters]]) -> list[Parameters]:
    """The whole model of each replica."""
    joined: dict[int, Parameters] = {}
    for replica, part in ranks:
        joined.setdefault(replica, {}).update(part)
    return [joined[replica] for replica in sorted(joined)]


def error(found: Parameters, expected: Parameters) -> float:
    assert found.keys() == expected.keys()
    return max(float((p - expected[name]).abs().max()) for name, p in found.items())


def plain(n_steps: int, policy: DiLoCo, n_replicas: int = 2) -> list[Parameters]:
    """Replicas as plain models, and the formula of the paper."""
    first = layers()
    models = [deepcopy(first) for _ in range(n_replicas)]
    optimizers = [sgd(model.parameters()) for model in models]
    last = [p.detach().clone() for p in first.parameters()]
    momenta = [torch.zeros_like(p) for p in last]
    for step in range(n_steps):
        for i, model in enumerate(models):
            x, y = share(step, i, n_replicas)
            optimizers[i].zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizers[i].step()
        if (step + 1) % policy.every:
            continue
        with torch.no_grad():
            for p, m, *copies in zip(
                last, momenta, *(x.parameters() for x in models), strict=True
            ):
                way = p - sum(copies) / n_replicas
                m.mul_(policy.outer_momentum).add_(way)
                p.sub_(policy.outer_lr * (way + policy.outer_momentum * m))
                for copy in copies:
                    copy.copy_(p)
    return [
        {name: p.detach() for name, p in model.named_parameters()} for model in models
    ]


def test_averaging_every_step_equals_summed_gradients(pool: Pool) -> None:
    summed, *others = (
        by_replica(pool.run(train, 4, averaging, 6))
        for averaging in (
            None,
            Periodic(every=1),
            DiLoCo(every=1, outer_lr=1, outer_momentum=0),
        )
    )
    for averaged in others:
        assert error(averaged[0], averaged[1]) == 0
        assert error(averaged[0], summed[0]) < 1e-12
    rare = by_replica(pool.run(train, 4, Periodic(every=4), 6))
    assert error(rare[0], rare[1]) > 1e-3 and error(rare[0], summed[0]) > 1e-3


def test_diloco_follows_the_formula_of_the_paper(pool: Pool) -> None:
    found = by_replica(pool.run(train, 4, diloco, 8))
    for here, expected in zip(found, plain(8, diloco), strict=True):
        assert error(here, expected) < 1e-12
    other = plain(8, DiLoCo(every=3, outer_lr=0.6, outer_momentum=0.7))
    assert error(found[0], other[0]) > 1e-4


@pytest.mark.parametrize("averaging", [Periodic(every=3), diloco])
def test_no_mode_changes_a_bit(pool: Pool, averaging: Any) -> None:
    """Also where each step, those before an average too, is rolled back."""
    settings = {"optimizer": adamw, "clip_grad_norm": CLIP, "tied": True}
    found = [
        by_replica(pool.run(_train, 4, averaging, 7, settings | more))
        for more in (
            {"mode": "1F1B", "post_validation": False},
            {"mode": "ZBV", "post_validation": True},
            {"mode": "ZBH2", "post_validation": True},
        )
    ]
    for one, other in pairwise(found):
        assert [error(*x) for x in zip(one, other, strict=True)] == [0, 0]
    assert error(*found[0]) > 1e-3


def _train(averaging: Any, n_steps: int, settings: Any) -> tuple[int, Parameters]:
    return train(averaging, n_steps, **settings)


@pytest.mark.slow
def test_no_split_changes_a_bit_of_three_replicas(pool: Pool) -> None:
    settings = {"optimizer": adamw, "tied": True, "n_replicas": 3, "mode": "1F1B"}
    one, two = (
        by_replica(pool.run(_train, 3 * n, diloco, 7, settings | {"n_stages": n}))
        for n in (1, 2)
    )
    assert [error(*x) for x in zip(one, two, strict=True)] == [0, 0, 0]
    assert error(two[0], two[2]) > 1e-3


def on_tp(folder: str) -> tuple[int, Parameters]:
    """Each replica has its layers in parts, and goes on from a checkpoint."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = zbpp.mesh(stages=1, data_parallel=2, tensor_parallel=2)
    number = mesh["dp"].get_local_rank()
    for steps in range(4), range(4, 8):
        model, how = layers(), ColwiseParallel(output_layouts=Replicate())
        for layer in model:
            parallelize_module(layer, mesh["tp"], {"0": how})
        of_replica = mesh["pp", "tp"]
        pipeline = make(model, "1F1B", mesh=of_replica, optimizer=sgd, n_stages=None)
        pipeline.average(diloco, mesh["dp"])
        pipeline.load(f"{folder}/{number}", missing_ok=True)
        for step in steps:
            pipeline.step(*share(step, number, 2))
        pipeline.save(f"{folder}/{number}", wait=True)
    return number, {name: whole(p) for name, p in pipeline.named_parameters()}


@pytest.mark.slow
def test_a_replica_may_have_tensor_parallelism(pool: Pool, tmp_path: Path) -> None:
    found = by_replica(pool.run(on_tp, 4, str(tmp_path)))
    for here, expected in zip(found, plain(8, diloco), strict=True):
        assert error(here, expected) < 1e-12
    assert error(*found) > 1e-3


def resumed(
    folder: str, averaging: Any, more: Any, model_only: bool
) -> tuple[int, Parameters]:
    """Four steps, and after a checkpoint between two averages four more."""
    first = build(averaging, optimizer=adamw)
    folder += f"/{replica()[0]}"
    go_on(first, range(4))
    first.save(folder, wait=True)
    first.close()
    with build(averaging, optimizer=adamw, **more) as second:
        second.load(folder, model_only=model_only)
        go_on(second, range(4, 8))
        return parameters(second)


@pytest.mark.parametrize("averaging", [Periodic(every=3), diloco])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    pool: Pool, averaging: Any, tmp_path: Path
) -> None:
    expected = by_replica(pool.run(_train, 4, averaging, 8, {"optimizer": adamw}))
    run = partial(pool.run, resumed, 4)
    found = by_replica(run(str(tmp_path / "a"), averaging, {"mode": "1F1B"}, False))
    assert [error(*x) for x in zip(found, expected, strict=True)] == [0, 0]
    other = by_replica(run(str(tmp_path / "b"), averaging, {}, True))
    assert error(other[0], expected[0]) > 1e-4
    elsewhere = by_replica(pool.run(continued, 2, str(tmp_path / "a"), averaging))
    assert [error(*x) for x in zip(elsewhere, expected, strict=True)] == [0, 0]


def continued(folder: str, averaging: Any) -> tuple[int, Parameters]:
    """On one stage."""
    with build(averaging, optimizer=adamw, n_stages=1, mode="1F1B") as pipeline:
        pipeline.load(f"{folder}/{replica(1)[0]}")
        go_on(pipeline, range(4, 8))
        return parameters(pipeline)


def begun_without(folder: str) -> str:
    """What was saved with averages has an optimizer more than a run without them."""
    with build(diloco, n_stages=1, mode="1F1B") as pipeline:
        pipeline.save(folder + str(dist.get_rank()), wait=True)
    with build(None, n_stages=1, mode="1F1B") as pipeline:
        return refusal(pipeline.load, folder + "0")


def test_outer_state_without_averages_is_refused(pool: Pool, tmp_path: Path) -> None:
    for text in pool.run(begun_without, 2, str(tmp_path)):
        assert "is that of 2 optimizers, and 1 step it here" in text


# Refusals.


def refusals() -> list[str]:
    """Of other policies, and of other steps."""
    texts, rank = [], dist.get_rank()
    for every, first in ((1 + rank, 0), (2, 2 * rank)):
        numerics = zbpp.Numerics(first_step=first)
        pipeline = build(Periodic(every=every), n_stages=1, numerics=numerics)
        texts.append(refusal(go_on, pipeline, range(2)))
    return texts


def test_impossible_averages_are_refused_on_all_ranks(pool: Pool) -> None:
    one, other = pool.run(refusals, 2)
    assert one == other
    for text in one:
        assert "pipelines average after other steps, or in other ways" in text
    assert "every is 0; give a whole number from 1 on" in refusal(Periodic, every=0)
    for wrong in ({"outer_lr": 0}, {"outer_momentum": 1.0}):
        assert "a momentum from 0 up to 1" in refusal(DiLoCo, every=1, **wrong)


def dies() -> None:
    """A process of the second replica ends between two averages."""
    pipeline = build(diloco)
    go_on(pipeline, range(2))
    if torch.distributed.get_rank() == 3:
        raise SystemExit("gone")
    go_on(pipeline, range(2, 3))


@pytest.mark.slow
def test_a_replica_that_dies_ends_the_others() -> None:
    ended = end_of(dies, 4)
    assert all(rank.code == 1 for rank in ended)
    assert "PeerError" in ended[0].words
    assert "waits in the average after step 2 for its replicas" in ended[0].words
