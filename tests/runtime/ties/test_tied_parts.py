"""A tied weight that tensor parallelism has dealt out: each process ties its part."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool
from small_model import refusal
from torch import Tensor, nn

import zbpp
from zbpp.checkpoint.tensors import whole

pytestmark = pytest.mark.dist

WORDS, WIDTH, N_LAYERS, STEPS = 12, 8, 4, 3

Found = tuple[list[tuple[float, float]], dict[str, Tensor]]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (8, 5), generator=generator)
    return words, words.roll(1, 1)


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def layers(indices: range, mesh: Any = None, *, head: str = "words") -> list[nn.Module]:
    """Some of the layers; the first and the last have the same weight.

    Args:
        indices: of the layers.
        mesh: over which their weights are dealt out; None: they are whole.
        head: how the last one is: by ``words``, as the first, or by ``width``.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    made: list[nn.Module] = [nn.Embedding(WORDS, WIDTH)]
    made += [nn.Linear(WIDTH, WIDTH) for _ in range(N_LAYERS - 2)]
    made.append(nn.Linear(WIDTH, WORDS, bias=False))
    made[-1].weight = nn.Parameter(made[0].weight.detach().clone())
    by_rows = RowwiseParallel(input_layouts=Replicate())
    by_words = ColwiseParallel(output_layouts=Replicate())
    if mesh is not None:
        parallelize_module(made[0], mesh, by_rows)
        parallelize_module(made[-1], mesh, by_words if head == "words" else by_rows)
    return made[indices.start : indices.stop]


def pipeline_of(
    build: Callable[[range], list[nn.Module]], *, is_tied: bool = True, **more: Any
) -> zbpp.Pipeline:
    tie = [((0, "weight"), (N_LAYERS - 1, "weight"))] if is_tied else []
    return zbpp.Pipeline(
        zbpp.layers_from(build, n_layers=N_LAYERS, ties=tie),
        loss_fn=loss_fn,
        optimizer=partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
        n_microbatches=4,
        device="cpu",
        **more,
    )


def train(pipeline: zbpp.Pipeline) -> Found:
    """Losses and norms, and this process's parameters, whole."""
    with pipeline:
        results = [pipeline.step(*batch(step)) for step in range(STEPS)]
        held = {n: whole(p).detach().clone() for n, p in pipeline.named_parameters()}
    return [(x.loss, x.grad_norm) for x in results], held


def train_in_parts(mode: str) -> tuple[Found, str]:
    """Two stages of two processes each; tied, and what is said of a tie unnamed."""
    mesh = zbpp.mesh(stages=2, tensor_parallel=2)
    build, how = partial(layers, mesh=mesh["tp"]), {"schedule": mode, "mesh": mesh}
    untied = refusal(pipeline_of, build, is_tied=False, **how)
    return train(pipeline_of(build, **how)), untied


@pytest.mark.parametrize("mode", ["ZBH1", pytest.param("ZBV", marks=pytest.mark.slow)])
def test_parts_are_tied_as_the_whole_is(pool: Pool, mode: str) -> None:
    results, plain = train(pipeline_of(layers, schedule="1F1B", n_stages=1))
    expected = [pytest.approx(own, rel=1e-5) for own in results]
    for (found, held), untied in pool.run(train_in_parts, 4, mode):
        assert found == expected
        assert "ties=[((0, 'weight'), (3, 'weight'))]" in untied
        for name, value in held.items():
            torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-6)


def tie_other_parts() -> str:
    mesh = zbpp.mesh(stages=2, tensor_parallel=2)
    return refusal(
        pipeline_of, partial(layers, mesh=mesh["tp"], head="width"), mesh=mesh
    )


def test_other_parts_on_another_stage_are_refused(pool: Pool) -> None:
    assert all("deal it out alike" in said for said in pool.run(tie_other_parts, 4))
