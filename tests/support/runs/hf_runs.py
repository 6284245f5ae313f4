"""Steps of small models of transformers, plain and as pipelines; gradients by name."""

from functools import cache
from typing import Any

import torch
from flat import flat_pipeline
from tiny_hf import batch_of, tiny

import zbpp

__all__ = ["M", "assert_plain", "parts_of", "piped", "plain", "weights_of"]

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
