"""Models of transformers as pipelines, against the plain model on the same batches."""

from functools import cache
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from pool import Pool
from tiny_hf import FAMILIES, batch_of, tiny, untied

import zbpp
from zbpp import RequestError

pytest.importorskip("transformers")

SLOW = pytest.mark.slow
QUICK = {("llama", "ZBV", 2), ("gemma3", "ZBH1", 4), ("gpt2", "ZBV", 2)}
MODES, STAGES = ("1F1B", "ZBH1", "ZBV"), (1, 2, 4)

GRID = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for i, family in enumerate(FAMILIES)
    for case in sorted(
        {(family, mode, STAGES[(i + j) % 3]) for j, mode in enumerate(MODES)}
        | {quick for quick in QUICK if quick[0] == family}
    )
]
"""Every mode and every number of stages with each family, and with one another."""


M = 4
"""Micro-batches, of two samples each."""

Run = tuple[list[float], dict[str, Any]]
"""Loss of each micro-batch, and gradients by the model's own names."""


def weights_of(family: str, batch: Any) -> list[float]:
    """Tokens, or samples, that each micro-batch's loss is a mean over."""
    labels = batch["labels"]
    if family == "vit":
        return [1] * M
    labels = labels if family in ("bert", "bart", "t5") else labels[:, 1:]
    return [int((part != -100).sum()) for part in labels.tensor_split(M)]


def parts_of(batch: Any) -> list[Any]:
    """The micro-batches of a batch that is a dict."""
    cut = {key: held.tensor_split(M) for key, held in batch.items()}
    return [{key: held[i] for key, held in cut.items()} for i in range(M)]


@cache
def plain(family: str, n_blocks: int, autocast: torch.dtype | None = None) -> Run:
    """The plain model, micro-batch by micro-batch; it is run once."""
    model, batch = tiny(family, n_blocks), batch_of(family, 2 * M)
    weights, losses = weights_of(family, batch), []
    for part, weight in zip(parts_of(batch), weights, strict=True):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = model(**part).loss
        loss.backward(torch.full_like(loss, weight / sum(weights)))
        losses.append(float(loss.detach()))
    return losses, {name: p.grad for name, p in model.named_parameters()}


def piped(
    family: str, mode: str, n_stages: int | None, n_blocks: int = 6, **more: Any
) -> Run:
    """The same in a pipeline; gradients of the stages of this process."""
    with flat_pipeline(
        tiny(family, n_blocks),
        optimizer=None,
        schedule=mode,
        n_stages=n_stages,
        n_microbatches=M,
        **more,
    ) as pipeline:
        result = pipeline.step(batch_of(family, 2 * M))
        gradients: dict[str, Any] = {}
        for executor in pipeline.stages.executors.values():
            for index, layer in executor.stage.numbered():
                for name, p in layer.named_parameters():
                    gradients[pipeline.layered.own_name(index, name)] = p.grad
    return list(result.losses), gradients


@cache
def tied_names(family: str) -> tuple[str, ...]:
    """Names of the tied parameter of a family's model, the first layer's first."""
    layered = zbpp.cut(tiny(family, 1))
    return tuple(layered.own_name(*end) for tie in layered.ties for end in tie)


@cache
def tied_gradient(family: str, n_blocks: int, autocast: torch.dtype | None) -> Any:
    """Of the tied parameter, on one stage: the same bits are due everywhere."""
    _, found = piped(family, "1F1B", 1, n_blocks, autocast=autocast)
    return found[tied_names(family)[0]]


def assert_plain(
    run: Run, family: str, n_blocks: int = 6, autocast: torch.dtype | None = None
) -> None:
    """Losses and gradients are the plain model's, to the bit.

    All but a tied parameter's: a plain loop adds up its layers' gradients micro-batch
    by micro-batch, a pipeline layer by layer. These agree within 1e-6 of the largest,
    and have the same bits under every mode and number of stages.
    """
    losses, expected = plain(family, n_blocks, autocast)
    assert run[0] == losses
    tied = tied_names(family)
    names = {name for name, gradient in expected.items() if gradient is not None}
    assert names <= run[1].keys()
    for name in names - {*tied}:
        assert torch.equal(run[1][name], expected[name]), name
    for name in tied:  # one for each stage that holds it
        found, gradient = run[1][name], expected[tied[0]]
        most = float(gradient.abs().max())
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-6 * most)
        assert torch.equal(found, tied_gradient(family, n_blocks, autocast)), name


@pytest.mark.parametrize(("family", "mode", "n_stages"), GRID)
def test_losses_and_all_gradients_equal_the_plain_model(family, mode, n_stages):
    """With padding masks and labels; tied weights as `assert_plain` says."""
    n_blocks = 6 if n_stages == 4 else 4
    assert_plain(piped(family, mode, n_stages, n_blocks), family, n_blocks)
    weights = weights_of(family, batch_of(family, 2 * M))
    assert len(set(weights)) > 1 or family == "vit", "padding is spread unevenly"


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name == "bert" else SLOW)
        for name in ("bert", "mixtral", "t5")
    ],
)
def test_autocast_gives_the_plain_models_bits(family):
    """BERT's blocks begin with three uses of their input, which is no leaf there."""
    more = {"autocast": torch.bfloat16}
    found = piped(family, "ZBV", 2, 4, **more)
    assert_plain(found, family, 4, **more)
    assert found[0] != plain(family, 4)[0]


def stepped(model, batch, mode="ZBH1", n_stages=2):
    """One step in a pipeline; gradients are left in the model."""
    with zbpp.Pipeline(
        model, optimizer=None, schedule=mode, n_stages=n_stages, n_microbatches=M
    ) as pipeline:
        return pipeline.step(batch), pipeline.evaluate(batch)


def test_the_loss_is_that_of_the_whole_batch():
    model, whole = untied("llama"), untied("llama")
    batch = batch_of("llama", 2 * M)
    result, evaluated = stepped(model, batch)
    expected = whole(**batch).loss
    expected.backward()
    assert evaluated == pytest.approx(result.loss, 1e-6)
    assert result.loss == pytest.approx(float(expected.detach()), rel=1e-6)
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["mixtral", pytest.param("t5", marks=SLOW)])
def test_recomputed_layers_keep_the_bits(family):
    assert_plain(piped(family, "ZBV", 2, 4, recompute="all"), family, 4)


def test_a_routers_loss_is_part_of_the_loss():
    """Each micro-batch's own, as in a plain loop; without it the loss is another."""
    losses, gradients = piped("mixtral", "ZBV", 2, 4)
    alone = tiny("mixtral", output_router_logits=False)
    for part, loss in zip(parts_of(batch_of("mixtral", 2 * M)), losses, strict=True):
        assert loss - float(alone(**part).loss.detach()) > 1e-3
    assert float(gradients["model.layers.0.mlp.gate.weight"].abs().max()) > 0


def test_steps_recomputed_and_rolled_back_are_a_plain_loop():
    """AdamW steps with clipping, post-validated, with lengths that change."""
    plain_one = untied("gemma3")
    optimizer = torch.optim.AdamW(plain_one.parameters(), lr=1e-2)
    batches = [batch_of("gemma3", 2 * M, seed=s, length=8 + s) for s in range(4)]
    with flat_pipeline(
        untied("gemma3"),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        schedule="ZBH1",
        n_stages=2,
        n_microbatches=M,
        clip_grad_norm=0.5,
        post_validation=True,
        recompute="all",
    ) as pipeline:
        results = [pipeline.step(batch) for batch in batches]
    for batch, result in zip(batches, results, strict=True):
        optimizer.zero_grad()
        weights, total = weights_of("gemma3", batch), 0.0
        for part, weight in zip(parts_of(batch), weights, strict=True):
            loss = plain_one(**part).loss * weight / sum(weights)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(plain_one.parameters(), 0.5)
        optimizer.step()
        assert result.loss == pytest.approx(total, rel=2e-5)
    assert sum(result.rollbacks for result in results) > 0


def test_predictions_are_the_plain_logits():
    """Also of a batch whose micro-batches are not of one size."""
    model, batch = tiny("llama").eval(), batch_of("llama", 2 * M + 1)
    ids = {"input_ids": batch["input_ids"]}
    with zbpp.Pipeline(
        model, optimizer=None, schedule="ZBV", n_stages=2, n_microbatches=M
    ) as pipeline:
        found = pipeline.predict(ids)["logits"]
        expected = [model(**part).logits.detach() for part in parts_of(ids)]
        assert torch.equal(found, torch.cat(expected))
        del batch["labels"]
        with pytest.raises(RequestError, match="needs the targets of the batch"):
            pipeline.step(batch)


def in_processes(cases):
    """Run on each rank: losses of micro-batches and gradients, of each case."""
    return [piped(family, mode, None) for family, mode in cases]


@pytest.mark.dist
@pytest.mark.slow  # the workers load transformers
def test_two_processes_find_the_same_gradients(pool: Pool):
    """Those of tied weights too, on both of their stages."""
    cases = [
        ("llama", "ZBV"),
        ("mixtral", "ZBH1"),
        ("gpt2", "ZBH1"),
        ("t5", "ZBH1"),
    ]
    ranks = pool.run(in_processes, 2, cases)
    for (family, _), first, last in zip(cases, *ranks, strict=True):
        assert not first[1].keys() & last[1].keys(), "each name is on one stage"
        losses = first[0] or last[0]
        assert_plain((losses, first[1] | last[1]), family)


@pytest.mark.slow
def test_an_example_gives_memory_and_a_split():
    with torch.device("meta"):
        model = untied("llama")
    batch = batch_of("llama", 2 * M)
    with flat_pipeline(
        zbpp.cut(model, weights=1),
        optimizer=torch.optim.AdamW,
        schedule="ZBH1",
        n_stages=2,
        n_microbatches=M,
        example=batch,
    ) as pipeline:
        assert sum(len(layers) for layers in pipeline.split) == 6
        sizes = [p.nbytes for p in model.parameters()]
        assert sum(pipeline.plan.costs.m_fixed) > 3 * sum(sizes), "weights and AdamW's"
        assert pipeline.step(batch).loss > 0
