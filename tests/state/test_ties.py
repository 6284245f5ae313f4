"""Weights that layers share: their first values, their gradients, and refusals.

Histories of tied weights are in test_histories.py, trainings in tests/bits.
"""

import gc
from functools import partial
from typing import Any

import pytest
import small
import torch
from pool import Pool
from small import refusal
from torch import Tensor, nn

import zbpp

WORDS, WIDTH, N_LAYERS = 12, 8, 6
TIE = [((0, "weight"), (N_LAYERS - 1, "weight"))]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (8, 5), generator=generator)
    return words, words.roll(1, 1)


def untied() -> list[nn.Module]:
    torch.manual_seed(0)
    inner = [nn.Linear(WIDTH, WIDTH) for _ in range(N_LAYERS - 2)]
    return [nn.Embedding(WORDS, WIDTH), *inner, nn.Linear(WIDTH, WORDS, bias=False)]


def tied() -> list[nn.Module]:
    layers = untied()
    layers[-1].weight = layers[0].weight
    return layers


def slices(layers: list[nn.Module], ties: Any = ()) -> Any:
    """A builder of layers."""
    build = lambda own: layers[own.start : own.stop]  # noqa: E731
    return zbpp.layers_from(build, n_layers=len(layers), ties=ties)


def make(
    model: Any, schedule: str = "ZBH1", n_stages: int | None = 2, **more: Any
) -> Any:
    settings = {"loss_fn": loss_fn, "optimizer": adamw, "n_stages": n_stages} | more
    return small.make(model, schedule, **settings)


def results(pipeline: zbpp.Pipeline) -> list[tuple[float, float]]:
    steps = [pipeline.step(*batch(step)) for step in range(3)]
    return [(result.loss, result.grad_norm) for result in steps]


def test_the_weights_of_the_first_layer_count_at_the_start() -> None:
    """Copies of a builder differ before the first step, not after."""
    layers = untied()
    in_lists = [[list(place) for place in tie] for tie in TIE]
    pipeline = make(slices(layers, in_lists))
    assert torch.equal(layers[0].weight, layers[-1].weight) and pipeline.ties == (*TIE,)
    assert results(pipeline) == results(make(tied()))


def gradient(n_stages: int) -> Tensor:
    """Of two steps whose gradients nobody clears, with a write in between."""
    layers = tied()
    pipeline = make(layers, n_stages=n_stages, optimizer=None)
    pipeline.step(*batch(0))
    with torch.no_grad():
        layers[0].weight.mul_(0.5)
    pipeline.step(*batch(1))
    pipeline.close()
    return layers[0].weight.grad


def test_gradients_without_an_optimizer_are_those_of_the_plain_model() -> None:
    ours = gradient(1)
    assert torch.equal(ours, gradient(2)) and torch.equal(ours, gradient(3))
    layers = tied()
    for step in range(2):
        inputs, targets = batch(step)
        loss_fn(nn.Sequential(*layers)(inputs), targets).backward()
        with torch.no_grad():
            layers[0].weight.mul_(0.5 if step == 0 else 1.0)
    torch.testing.assert_close(ours, layers[0].weight.grad)


# While a pipeline lives, each layer has a separate parameter on the same memory.


@pytest.mark.parametrize(
    ("end", "n_stages"), [("close", 1), ("close", 2), ("failure", 2), ("drop", 2)]
)
def test_layers_are_tied_again_at_the_end(end: str, n_stages: int) -> None:
    layers = tied()
    pipeline = make(layers, n_stages=n_stages)
    pipeline.step(*batch())
    pipeline.synchronize()
    first, last = layers[0].weight, layers[-1].weight
    assert first is not last and first.data_ptr() == last.data_ptr()
    if end == "close":
        pipeline.close()
    elif end == "failure":
        with pytest.raises(IndexError):
            pipeline.step(batch()[0] + WORDS, batch()[1])
    else:
        del pipeline
        gc.collect()
    assert layers[-1].weight is layers[0].weight is first


def test_the_other_layers_follow_the_first_one() -> None:
    """In its memory and its freezing."""
    layers, halved = tied(), tied()
    halved[0].weight.data.mul_(0.5)
    layers[0].weight.requires_grad_(False)
    pipeline = make(layers)
    layers[0].weight.requires_grad_(True)
    layers[0].weight.data = layers[0].weight.data * 0.5
    assert results(pipeline) == results(make(halved))


def test_a_model_of_another_pipeline_is_still_tied() -> None:
    layers = tied()
    first = make(layers)
    second = make(layers)
    assert second.ties == first.ties == tuple(TIE)
    del first
    assert results(second) == results(make(tied()))


# What is refused.


@pytest.mark.parametrize("n_stages", [1, 2])
def test_sparse_gradients_of_a_tied_weight_are_refused(n_stages: int) -> None:
    layers = untied()
    layers[0] = nn.Embedding(WORDS, WIDTH, sparse=True)
    layers[-1].weight = layers[0].weight
    sgd = partial(torch.optim.SGD, lr=0.1)
    pipeline = make(layers, "1F1B", n_stages, optimizer=sgd)
    assert "sparse=False" in refusal(pipeline.step, *batch())


@pytest.mark.parametrize(
    ("ties", "words"),
    [
        ([], "layers 0 and 5 share a parameter"),
        ([((0, "weight"),)], "two layers or more"),
        ([((0, "weight"), (0, "bias"))], "two layers or more"),
        ([*TIE, ((5, "weight"), (2, "weight"))], "in no other tie"),
        ([((0, "weight"), (6, "weight"))], "6 layers, 0 to 5"),
        ([((0, "weight"), (2, "nothing"))], "layer 2 has no parameter nothing"),
    ],
)
def test_other_ties_than_those_of_the_layers_are_refused(ties: Any, words: str) -> None:
    assert words in refusal(lambda: make(slices(tied(), ties)))


def test_a_shared_parameter_missing_from_the_ties_is_refused() -> None:
    layers = tied()
    layers[3].bias = layers[2].bias
    words = refusal(lambda: make(slices(layers, TIE)))
    assert "layers 2 and 3 share a parameter" in words
    assert layers[0].weight is layers[-1].weight
    assert make(layers).ties == (*TIE, ((2, "bias"), (3, "bias")))


def test_a_module_in_two_layers_is_refused() -> None:
    inner = nn.Linear(WIDTH, WIDTH)
    layers = [*untied()[:-1], inner, inner]
    assert "layers 5 and 6 share the Linear with" in refusal(make, layers)


def test_a_tie_within_one_chunk_needs_no_name() -> None:
    results(make(slices(tied()), "1F1B", 1))


# Tensor parallelism: each process ties its part.


def sharded(
    indices: range, mesh: Any = None, *, head: str = "words"
) -> list[nn.Module]:
    """Some of the layers; the head is sharded by words, as the embedding, or not."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    layers = untied()
    layers[-1].weight = nn.Parameter(layers[0].weight.detach().clone())
    by_rows = RowwiseParallel(input_layouts=Replicate())
    by_words = ColwiseParallel(output_layouts=Replicate())
    if mesh is not None:
        parallelize_module(layers[0], mesh, by_rows)
        parallelize_module(layers[-1], mesh, by_words if head == "words" else by_rows)
    return layers[indices.start : indices.stop]


def train_parts() -> tuple[Any, dict[str, Tensor], str]:
    """Results and whole weights; words on a tie of other parts."""
    mesh = zbpp.mesh(stages=2, tensor_parallel=2)
    build = partial(sharded, mesh=mesh["tp"])

    def pipeline(build: Any, ties: Any) -> zbpp.Pipeline:
        model = zbpp.layers_from(build, n_layers=N_LAYERS, ties=ties)
        return make(model, n_stages=None, mesh=mesh)

    other = refusal(pipeline, partial(build, head="width"), TIE)
    with pipeline(build, TIE) as trained:
        found = results(trained)
        whole = {
            name: getattr(p, "full_tensor", lambda p=p: p)().detach().clone()
            for name, p in trained.named_parameters()
        }
    return found, whole, other


@pytest.mark.dist
def test_sharded_parameters_are_tied_like_whole_ones(pool: Pool) -> None:
    plain = make(zbpp.layers_from(sharded, n_layers=N_LAYERS, ties=TIE), "1F1B", 1)
    expected = [pytest.approx(result, rel=1e-5) for result in results(plain)]
    weights = {name: p.detach() for name, p in plain.named_parameters()}
    for found, whole, other in pool.run(train_parts, 4):
        assert found == expected
        assert "layers.0.weight = layers.5.weight" in other
        for name, value in whole.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-6)
