"""Tied models of transformers: an embedding that is the head, first layer and last."""

import copy
import itertools

import pytest
import torch
from pool import Pool
from tiny_hf import batch_of, tiny

import zbpp

pytest.importorskip("transformers")

M = 4
QUICK = {("gpt2", "ZBV", 2)}
GRID = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in itertools.product(
        ("gpt2", "gemma2", "gemma3", "bert"), ("1F1B", "ZBH1", "ZBV"), (1, 2, 4)
    )
]


def step(model, mode, n_stages=None, **more):
    """Take one step; return the loss and this process's gradients by own names."""
    with zbpp.Pipeline(
        model,
        optimizer=None,
        schedule=mode,
        n_stages=n_stages,
        n_microbatches=M,
        weigh="samples",
        **more,
    ) as pipeline:
        result = pipeline.step(batch_of(pipeline_family(model), 2 * M))
        gradients = {
            pipeline.layered.own_name(index, name): parameter.grad
            for executor in pipeline._executors.values()
            for index, layer in executor.stage.numbered()
            for name, parameter in layer.named_parameters()
        }
    return result.loss, gradients


def pipeline_family(model):
    return "bert" if "Bert" in type(model).__name__ else "gpt2"


def plain_gradients(model):
    """Gradients by micro-batches, and their mean loss."""
    batch, total = batch_of(pipeline_family(model), 2 * M), 0.0
    for i in range(M):
        part = {key: held[2 * i : 2 * i + 2] for key, held in batch.items()}
        loss = model(**part).loss
        loss.backward(torch.full_like(loss, 1 / M))
        total += float(loss.detach()) / M
    return total, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(("family", "mode", "n_stages"), GRID)
def test_gradients_equal_the_plain_model(family, mode, n_stages):
    """All but the tied one to the bit: its two layers' sums are added at the end."""
    model = tiny(family, 6)
    expected_loss, expected = plain_gradients(copy.deepcopy(model))
    _, at_once = step(copy.deepcopy(model), "1F1B", 1)
    loss, found = step(model, mode, n_stages)
    assert loss == pytest.approx(expected_loss, 1e-12)
    (tie,) = zbpp.cut(model).ties
    tied = zbpp.cut(model).own_name(*tie[0])
    for name, gradient in expected.items():
        if name == tied:
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-7)
            assert torch.equal(found[name], at_once[name])
        elif gradient is not None:
            assert torch.equal(found[name], gradient), name


def test_a_tie_broken_fails():
    """Negative control: without the tie each holder has its own uses only."""
    model = tiny("gpt2", 6)
    _, expected = plain_gradients(copy.deepcopy(model))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    _, found = step(model, "ZBV", 2)
    name = "transformer.wte.weight"
    assert (found[name] - expected[name]).abs().max() > 1e-4


def trained(weights):
    """Three steps of AdamW from weights on meta; parameters of this process."""
    with torch.device("meta"):
        model = tiny("gpt2", 6)
    with zbpp.Pipeline(
        zbpp.cut(model, weights=weights),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        schedule="ZBV",
        n_stages=None if torch.distributed.is_initialized() else 2,
        n_microbatches=M,
        clip_grad_norm=1.0,
    ) as pipeline:
        losses = [
            pipeline.step(batch_of("gpt2", 2 * M, seed=seed)).loss for seed in range(3)
        ]
        state = pipeline.state_dict()["model"]
    return losses, {name: tensor.clone() for name, tensor in state.items()}


def test_a_tied_model_on_meta_stays_tied():
    losses, state = trained(3)
    assert torch.equal(state["transformer.wte.weight"], state["lm_head.weight"])
    assert losses[-1] < losses[0]


@pytest.mark.dist
@pytest.mark.slow  # the workers load transformers
def test_two_processes_make_their_own_layers_of_a_tied_model(pool: Pool):
    losses, expected = trained(3)
    found = {}
    for its, state in pool.run(trained, 2, 3):
        assert its == losses
        found |= state
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
