"""Models of transformers as pipelines, against the plain model on the same batches."""

import copy
import itertools

import pytest
import torch
from pool import Pool
from tiny_hf import FAMILIES, batch_of, untied

import zbpp
from zbpp import RequestError
from zbpp.models.calls import Plan
from zbpp.runtime.optim.patience import Patience

pytest.importorskip("transformers")

M = 4
SLOW = pytest.mark.slow
QUICK = {("llama", "ZBV", 2), ("gemma3", "ZBH1", 4)}
GRID = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in itertools.product(FAMILIES, ("1F1B", "ZBH1", "ZBV"), (1, 2, 4))
]


def model_of(family):
    """Six blocks: with what is before and after, eight layers for eight chunks."""
    return untied(family, 6) if family != "vit" else untied("vit", 6)


def by_microbatches(plain, batch, weights):
    """Add the gradients of micro-batches as `Pipeline` does; return the mean loss."""
    n = len(batch["labels"]) // M
    total = 0.0
    for i, weight in enumerate(weights):
        part = {key: held[i * n : (i + 1) * n] for key, held in batch.items()}
        loss = plain(**part).loss
        loss.backward(torch.full_like(loss, weight / sum(weights)))
        total += float(loss.detach()) * weight / sum(weights)
    return total


def weights_of(family, batch):
    """Tokens that each micro-batch's loss is a mean over."""
    labels = batch["labels"]
    if family == "vit":
        return [1] * M
    labels = labels if family == "bert" else labels[:, 1:]
    return [int((part != -100).sum()) for part in labels.tensor_split(M)]


def unequal(model, plain):
    pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
    return [
        name
        for (name, p), q in pairs
        if (p.grad is None) != (q.grad is None)
        or (p.grad is not None and not torch.equal(p.grad, q.grad))
    ]


@pytest.mark.parametrize(("family", "mode", "n_stages"), GRID)
def test_losses_and_all_gradients_equal_the_plain_model(family, mode, n_stages):
    model = model_of(family)
    plain, batch = copy.deepcopy(model), batch_of(family, 2 * M)
    with zbpp.Pipeline(
        model, optimizer=None, schedule=mode, n_stages=n_stages, n_microbatches=M
    ) as pipeline:
        result = pipeline.step(batch)
    weights = weights_of(family, batch)
    assert result.loss == pytest.approx(by_microbatches(plain, batch, weights), 1e-12)
    assert not unequal(model, plain)
    assert len(set(weights)) > 1 or family == "vit", "padding is spread unevenly"


@pytest.mark.parametrize(
    "family", ["llama", pytest.param("bert", marks=pytest.mark.slow)]
)
def test_the_loss_is_that_of_the_whole_batch(family):
    model = model_of(family)
    plain, batch = copy.deepcopy(model), batch_of(family, 2 * M)
    with zbpp.Pipeline(
        model, optimizer=None, schedule="ZBH1", n_stages=2, n_microbatches=M
    ) as pipeline:
        result = pipeline.step(batch)
        assert pipeline.evaluate(batch) == pytest.approx(result.loss, 1e-6)
    expected = plain(**batch).loss
    expected.backward()
    assert result.loss == pytest.approx(float(expected.detach()), rel=1e-6)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "family", ["mixtral", pytest.param("gemma2", marks=pytest.mark.slow)]
)
def test_recomputed_layers_keep_the_bits(family):
    model = model_of(family)
    plain, batch = copy.deepcopy(model), batch_of(family, 2 * M)
    with zbpp.Pipeline(
        model,
        optimizer=None,
        schedule="ZBV",
        n_stages=2,
        n_microbatches=M,
        recompute="all",
    ) as pipeline:
        pipeline.step(batch)
        gradients = {
            pipeline.layered.own_name(index, name): p.grad.clone()
            for executor in pipeline._executors.values()
            for index, layer in executor.stage.numbered()
            for name, p in layer.named_parameters()
        }
    by_microbatches(plain, batch, weights_of(family, batch))
    for name, p in plain.named_parameters():
        assert torch.equal(gradients[name], p.grad), name


def test_a_mask_dropped_fails(monkeypatch):
    """Negative control."""
    calls = Plan.calls

    def without_masks(self, batch, device):
        return calls(self, {**batch, "attention_mask": None}, device)

    model = model_of("llama")
    plain, batch = copy.deepcopy(model), batch_of("llama", 2 * M)
    batch["attention_mask"] = batch["attention_mask"].flip(1)  # padded on the left
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    by_microbatches(plain, batch, weights_of("llama", batch))
    for breaks in (False, True):
        ours = copy.deepcopy(model)
        if breaks:
            monkeypatch.setattr(Plan, "calls", without_masks)
        layered = zbpp.cut(ours)
        with zbpp.Pipeline(
            layered, optimizer=None, schedule="ZBV", n_stages=2, n_microbatches=M
        ) as pipeline:
            if breaks:  # its first forward would notice, and let the masks travel
                front = next(pipeline.named_layers())[1]
                front.carries = False
            pipeline.step(batch)
        assert bool(unequal(ours, plain)) == breaks


def test_steps_recomputed_and_rolled_back_are_a_plain_loop():
    """AdamW steps with clipping, post-validated, with lengths that change."""
    model = model_of("gemma3")
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    batches = [batch_of("gemma3", 2 * M, seed=s, length=8 + s) for s in range(5)]
    with zbpp.Pipeline(
        model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        schedule="ZBH1",
        n_stages=2,
        n_microbatches=M,
        clip_grad_norm=0.5,
        patience=Patience(failures=11, clean=1),
        recompute="all",
    ) as pipeline:
        results = [pipeline.step(batch) for batch in batches]
    for batch, result in zip(batches, results, strict=True):
        optimizer.zero_grad()
        loss = by_microbatches(plain, batch, weights_of("gemma3", batch))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        assert result.loss == pytest.approx(loss, rel=2e-5)
    assert sum(result.rollbacks for result in results) > 0


def test_predictions_are_the_plain_logits():
    model = model_of("llama").eval()
    batch = {"input_ids": batch_of("llama", 2 * M)["input_ids"]}
    with zbpp.Pipeline(
        model, optimizer=None, schedule="ZBV", n_stages=2, n_microbatches=M
    ) as pipeline:
        found = pipeline.predict(batch)["logits"]
    torch.testing.assert_close(found, model(**batch).logits.detach())


def test_a_batch_without_labels_is_refused_in_a_step():
    with zbpp.Pipeline(
        model_of("llama"), optimizer=None, schedule="ZBV", n_stages=2, n_microbatches=M
    ) as pipeline:
        batch = batch_of("llama", 2 * M)
        del batch["labels"]
        with pytest.raises(RequestError, match="needs the targets of the batch"):
            pipeline.step(batch)


def in_processes(family, mode):
    """Run on each rank: gradients by the model's own names, and the loss."""
    model = model_of(family)
    with zbpp.Pipeline(
        model, optimizer=None, schedule=mode, n_microbatches=M
    ) as pipeline:
        result = pipeline.step(batch_of(family, 2 * M))
        names = {
            id(p): pipeline.layered.own_name(index, name)
            for executor in pipeline._executors.values()
            for index, layer in executor.stage.numbered()
            for name, p in layer.named_parameters()
        }
        grads = {names[id(p)]: p.grad for p in model.parameters() if id(p) in names}
    return result.loss, grads


@pytest.mark.dist
@pytest.mark.slow  # the workers load transformers
@pytest.mark.parametrize(
    ("family", "mode"),
    [("llama", "ZBV"), ("mixtral", "ZBH1"), ("vit", "ZBV"), ("gemma3", "1F1B")],
)
def test_two_processes_find_the_same_gradients(pool: Pool, family, mode):
    plain, batch = model_of(family), batch_of(family, 2 * M)
    total = by_microbatches(plain, batch, weights_of(family, batch))
    found = {}
    for loss, grads in pool.run(in_processes, 2, family, mode):
        assert loss == pytest.approx(total, 1e-12)
        found |= grads
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(found[name], grad) if grad is not None else True, name


@pytest.mark.parametrize(
    ("family", "is_made"),
    [
        pytest.param("llama", True, marks=SLOW),
        ("llama", False),
        pytest.param("gpt2", True, marks=SLOW),
    ],
)
def test_an_example_gives_memory_and_a_split(family, is_made):
    with torch.device("cpu" if is_made else "meta"):
        model = model_of(family)
    batch = batch_of(family, 2 * M)
    with zbpp.Pipeline(
        model if is_made else zbpp.cut(model, weights=1),
        optimizer=torch.optim.AdamW,
        schedule="ZBH1",
        n_stages=2,
        n_microbatches=M,
        example=batch,
    ) as pipeline:
        assert sum(len(layers) for layers in pipeline.split) == 8
        sizes = [p.nbytes for p in model.parameters()]
        assert sum(pipeline.memory.m_fixed) > 3 * sum(sizes), "weights and AdamW's"
        assert pipeline.step(batch).loss > 0
