"""Models of transformers as pipelines, against the plain model on the same batches."""

import operator
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from allpairspy import AllPairs
from pages import ROOT
from pool import Pool
from tiny_hf import FAMILIES, batch_of, tiny

import zbpp
from zbpp import RequestError
from zbpp.models import Family, layered_of, register

pytestmark = [pytest.mark.needs("transformers"), pytest.mark.xdist_group("hf")]

M = 4
"""Micro-batches, of two samples each."""


class Case(NamedTuple):
    """A family and how its model runs."""

    family: str
    mode: str = "ZBV"
    n_stages: int | None = 2
    recompute: str | None = None
    autocast: torch.dtype | None = None
    tied: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What the plain model and its bits depend on."""
        return self.family, self.autocast, self.tied

    def model(self) -> Any:
        return tiny(self.family, 6, tie_word_embeddings=self.tied)


HOW = [
    ["1F1B", "ZBH1", "ZBV"],
    [1, 2, 4],
    [None, "all"],
    [None, torch.bfloat16],
    [False, True],
]
DEAL = [tuple(row) for row in AllPairs(HOW)]
EACH = [Case(family, *DEAL[i % len(DEAL)]) for i, family in enumerate(FAMILIES)]
"""Each family once, and every pair of two settings with some family."""
REST = [Case(*row) for row in AllPairs([list(FAMILIES), *HOW])]
"""Every setting with each family, and with one another."""
QUICK = {"llama", "gpt2"}

Run = tuple[list[float], dict[str, Any]]
"""Loss of each micro-batch, and gradients by the model's own names."""


def cases() -> Iterator[Any]:
    marks = pytest.mark.slow, pytest.mark.nightly
    for case in EACH:
        quick = case.family in QUICK
        yield pytest.param(case, marks=[] if quick else marks[:1], id=case.family)
    for i, case in enumerate(REST):
        yield pytest.param(case, marks=marks, id=f"{i}-{case.family}")


def weights_of(family: str, batch: Any) -> list[float]:
    """Tokens, or samples, that each micro-batch's loss is a mean over."""
    labels = batch["labels"]
    if family == "vit":
        return [1] * M
    labels = labels if family in ("bert", "bart", "t5") else labels[:, 1:]
    return [int((part != -100).sum()) for part in labels.tensor_split(M)]


def parts_of(batch: Any) -> list[Any]:
    """The micro-batches of a batch that is a dict."""
    cut = {key: value.tensor_split(M) for key, value in batch.items()}
    return [{key: values[i] for key, values in cut.items()} for i in range(M)]


@cache
def plain(key: tuple[Any, ...]) -> Run:
    """The plain model, micro-batch by micro-batch; it is run once."""
    family, autocast, tied = key
    model, batch = Case(family, tied=tied).model(), batch_of(family, 2 * M)
    weights, losses = weights_of(family, batch), []
    for part, weight in zip(parts_of(batch), weights, strict=True):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss = model(**part).loss
        loss.backward(torch.full_like(loss, weight / sum(weights)))
        losses.append(float(loss.detach()))
    return losses, {name: p.grad for name, p in model.named_parameters()}


def piped(case: Case) -> Run:
    """The same in a pipeline; gradients of the stages of this process."""
    model, numerics = case.model(), zbpp.Numerics(autocast=case.autocast)
    plan: Any = case.mode
    if case.recompute:
        plan = zbpp.plan_model(
            model, case.mode, n_stages=case.n_stages, n_microbatches=M,
            recompute=case.recompute, numerics=numerics,
        )  # fmt: skip
    with zbpp.Pipeline(
        model, plan, n_stages=case.n_stages, n_microbatches=M, optimizer=None,
        numerics=numerics,
    ) as pipeline:  # fmt: skip
        batch = batch_of(case.family, 2 * M)
        result = pipeline.step(batch)
        weights = weights_of(case.family, batch)
        if result.losses:  # on the last stage
            total = sum(map(operator.mul, weights, result.losses))
            assert result.loss == pytest.approx(total / sum(weights), rel=1e-6)
        return list(result.losses), {n: p.grad for n, p in pipeline.named_parameters()}


@cache
def tied_names(family: str, tied: bool) -> tuple[str, ...]:
    """Names of the tied parameter of a family's model, the first layer's first."""
    layered = zbpp.cut(Case(family, tied=tied).model())
    return tuple(layered.own_name(*end) for tie in layered.ties for end in tie)


@cache
def tied_gradient(key: tuple[Any, ...], name: str) -> Any:
    """Of a tied parameter, on one stage: the same bits are due everywhere."""
    family, autocast, tied = key
    return piped(Case(family, "1F1B", 1, None, autocast, tied))[1][name]


def assert_plain(run: Run, case: Case) -> None:
    """Losses and gradients are the plain model's, to the bit.

    All but a tied parameter's: a plain loop adds up its layers' gradients micro-batch
    by micro-batch, a pipeline layer by layer. These agree within 1e-6 of the largest,
    and have the same bits under every mode and number of stages.
    """
    losses, expected = plain(case.key)
    assert run[0] == losses
    tied = tied_names(case.family, case.tied)
    names = {name for name, gradient in expected.items() if gradient is not None}
    assert names <= run[1].keys()
    for name in names - {*tied}:
        assert torch.equal(run[1][name], expected[name]), name
    for name in tied:  # one for each stage that holds it
        if name not in run[1]:
            continue
        found, gradient = run[1][name], expected[tied[0]]
        most = float(gradient.abs().max())
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-6 * most)
        assert torch.equal(found, tied_gradient(case.key, tied[0])), name


@pytest.mark.parametrize("case", [*cases()])
def test_losses_and_all_gradients_equal_the_plain_model(case: Case) -> None:
    """With padding masks and labels; tied weights as `assert_plain` says."""
    assert_plain(piped(case), case)
    weights = weights_of(case.family, batch_of(case.family, 2 * M))
    assert len(set(weights)) > 1 or case.family == "vit", "padding is spread unevenly"


def in_processes(rows: list[tuple[Any, ...]]) -> list[Run]:
    """Run on each rank: losses of micro-batches and gradients, of each case."""
    return [piped(Case(*row)) for row in rows]


@pytest.mark.dist
@pytest.mark.slow  # the workers load transformers
def test_two_processes_find_the_same_gradients(pool: Pool) -> None:
    """Those of tied weights too, on both of their stages."""
    each = [Case("gpt2", "ZBH1", tied=True), Case("t5")]
    rows = [tuple(case._replace(n_stages=None)) for case in each]
    ranks = pool.run(in_processes, 2, rows)
    for case, first, last in zip(each, *ranks, strict=True):
        assert not first[1].keys() & last[1].keys(), "each name is on one stage"
        assert_plain((first[0] or last[0], first[1] | last[1]), case)


def test_a_routers_loss_is_part_of_the_loss() -> None:
    """Each micro-batch's own, as in a plain loop; without it the loss is another."""
    losses, gradients = piped(Case("mixtral"))
    alone = tiny("mixtral", 6, output_router_logits=False, tie_word_embeddings=False)
    for part, loss in zip(parts_of(batch_of("mixtral", 2 * M)), losses, strict=True):
        assert loss - float(alone(**part).loss.detach()) > 1e-3
    assert float(gradients["model.layers.0.mlp.gate.weight"].abs().max()) > 0


def test_predictions_and_losses_of_any_length_are_the_plain_models() -> None:
    """Also of a batch whose micro-batches are not of one size."""
    model, batch = tiny("gemma3").eval(), batch_of("gemma3", 2 * M + 1)
    ids = {"input_ids": batch["input_ids"]}
    with zbpp.Pipeline(
        model, "ZBV", optimizer=None, n_stages=2, n_microbatches=M
    ) as pipeline:
        found = pipeline.predict(ids)["logits"]
        expected = [model(**part).logits.detach() for part in parts_of(ids)]
        assert torch.equal(found, torch.cat(expected))
        for length in (12, 7):
            longer = batch_of("gemma3", M, length=length)
            loss = model(**longer).loss.detach()
            assert pipeline.evaluate(longer) == pytest.approx(float(loss), rel=1e-6)
        del batch["labels"]
        with pytest.raises(RequestError, match="needs the targets of the batch"):
            pipeline.step(batch)


def names_of(layered: Any) -> list[list[str]]:
    return [
        [name for name, _ in layer.named_parameters()]
        for layer in layered.build(range(layered.n_layers))
    ]


def test_a_family_is_cut_as_registered_or_by_its_path_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("gpt2")
    registered, by_path = layered_of(model), zbpp.cut(model, "transformer.h")
    assert by_path.ties == registered.ties and len(by_path.ties) == 1
    assert names_of(by_path) == names_of(registered)
    monkeypatch.setattr(type(model.config), "model_type", "mine")
    with pytest.raises(RequestError, match=r"no family is registered.*zbpp\.cut"):
        layered_of(model)
    register("mine", Family("h", ("wte", "wpe", "drop"), ("ln_f",)))
    assert layered_of(model).n_layers == 6


def test_a_batch_that_is_no_dict_or_has_no_labels_is_refused() -> None:
    layered = layered_of(tiny("llama"))
    with pytest.raises(RequestError, match="takes a dict with input_ids"):
        layered.cut_batch(torch.zeros(2, 3))
    with pytest.raises(RequestError, match="needs labels in the batch"):
        layered.loss_fn({}, None)


@pytest.mark.slow
def test_the_example_that_is_resumed_is_the_run_without_a_stop(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    example, threads = ROOT / "examples" / "hf_causal_lm.py", torch.get_num_threads()

    def script(folder: str, flags: str) -> list[str]:
        argv = [example.name, str(ROOT / "README.md"), "--folder", folder]
        monkeypatch.setattr(sys, "argv", [*argv, *flags.split()])
        runpy.run_path(str(example), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    monkeypatch.chdir(tmp_path)
    try:
        whole = script("whole", "--stages 2 --steps 12")
        first = script("parts", "--stages 2 --steps 10")
        then = script("parts", "--stages 4 --mode ZBV --steps 12")
    finally:
        torch.set_num_threads(threads)
    assert len(whole) == 12 and first + then == whole
    losses = [float(line.split()[-1]) for line in whole]
    assert losses[-1] < losses[0] - 1
