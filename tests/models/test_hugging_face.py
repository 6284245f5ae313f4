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
from tiny_hf import EXPORTED, FAMILIES, batch_of, tiny

import zbpp
from zbpp import RequestError
from zbpp.models import layered_of

pytestmark = pytest.mark.needs("transformers")

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

    def layers(self) -> Any:
        """The model as a pipeline takes it."""
        model = self.model()
        if self.family not in EXPORTED:
            return model
        return zbpp.cut(model, example=parts_of(batch_of(self.family, 2 * M))[0])


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
QUICK, SLOW = {"llama", "gpt2"}, {"gemma3", "mixtral"}
"""Families of CI: tied ends, two kinds of attention, experts; export: `test_cut`."""

Run = tuple[list[float], dict[str, Any]]
"""Loss of each micro-batch, and gradients by the names of the model."""


def cases() -> Iterator[Any]:
    marks = pytest.mark.slow, pytest.mark.nightly
    for case in EACH:
        n_marks = 0 if case.family in QUICK else 1 if case.family in SLOW else 2
        yield pytest.param(case, marks=marks[:n_marks], id=case.family)
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
    model, numerics = case.layers(), zbpp.Numerics(autocast=case.autocast)
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
    layered = layered_of(Case(family, tied=tied).layers())
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
    and have the same bits under every mode and number of stages. An exported graph has
    the casts of the dtypes of its example, so under autocast it rounds otherwise.
    """
    losses, expected = plain(case.key)
    rounds = case.family in EXPORTED and case.autocast is not None
    assert run[0] == (pytest.approx(losses, rel=1e-2) if rounds else losses)
    tied = tied_names(case.family, case.tied)
    names = {name for name, gradient in expected.items() if gradient is not None}
    assert names <= run[1].keys()
    for name in names - {*tied}:
        found, gradient = run[1][name], expected[name]
        if rounds:
            most = float(gradient.abs().max())
            torch.testing.assert_close(found, gradient, rtol=0, atol=0.03 * most)
        else:
            assert torch.equal(found, gradient), name
    for name in tied:  # one for each stage that holds it
        if name not in run[1]:
            continue
        found, gradient = run[1][name], expected[tied[0]]
        most = float(gradient.abs().max())
        atol = (0.03 if rounds else 1e-6) * most
        torch.testing.assert_close(found, gradient, rtol=0, atol=atol)
        assert torch.equal(found, tied_gradient(case.key, tied[0])), name


@pytest.mark.parametrize("case", [*cases()])
def test_losses_and_all_gradients_equal_the_plain_model(case: Case) -> None:
    """With padding masks and labels; tied weights as in `assert_plain`."""
    assert_plain(piped(case), case)
    weights = weights_of(case.family, batch_of(case.family, 2 * M))
    assert len(set(weights)) > 1 or case.family == "vit", "padding is spread unevenly"


def in_process(row: tuple[Any, ...]) -> Run:
    return piped(Case(*row))


@pytest.mark.dist
@pytest.mark.slow  # the workers load transformers
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2", "ZBH1", tied=True),
        pytest.param(Case("t5"), marks=pytest.mark.nightly),
    ],
)
def test_two_processes_find_the_same_gradients(pool: Pool, case: Case) -> None:
    """Those of tied weights too, on both of their stages."""
    first, last = pool.run(in_process, 2, tuple(case._replace(n_stages=None)))
    assert not first[1].keys() & last[1].keys(), "each name is on one stage"
    assert_plain((first[0] or last[0], first[1] | last[1]), case)


@pytest.mark.slow
def test_a_routers_loss_is_part_of_the_loss_of_an_exported_model() -> None:
    """That of each micro-batch, as in a plain loop; without it the loss differs."""
    batch = batch_of("mixtral", 2 * M)
    parts = parts_of(batch)
    model = tiny("mixtral", 6, output_router_logits=True)
    with pytest.raises(RequestError, match="output_router_logits is set"):
        layered_of(model)
    with zbpp.Pipeline(
        zbpp.cut(model, example=parts[0]), "1F1B", optimizer=None, n_stages=2,
        n_microbatches=M,
    ) as pipeline:  # fmt: skip
        losses = pipeline.step(batch).losses
    plain, alone = tiny("mixtral", 6, output_router_logits=True), tiny("mixtral", 6)
    for part, loss in zip(parts, losses, strict=True):
        assert loss == pytest.approx(float(plain(**part).loss.detach()), rel=1e-6)
        assert loss - float(alone(**part).loss.detach()) > 1e-3


def test_predictions_and_losses_of_any_length_equal_the_plain_model() -> None:
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


def test_a_model_is_cut_at_the_blocks_that_it_has_or_at_a_path() -> None:
    model = tiny("gpt2")
    found, by_path = layered_of(model), zbpp.cut(model, "transformer.h")
    assert by_path.ties == found.ties and len(by_path.ties) == 1
    assert by_path.n_layers == found.n_layers == 6
    with pytest.raises(RequestError, match=r"transformer is a GPT2Model .*'transfor"):
        zbpp.cut(model, "transformer")
    with pytest.raises(RequestError, match="is cut by export, which needs a micro"):
        layered_of(tiny("t5"))


def test_a_dropout_before_the_blocks_is_drawn_once() -> None:
    model, batch = tiny("gpt2", embd_pdrop=0.5), batch_of("gpt2")
    layered = layered_of(model)
    torch.manual_seed(3)
    value, _ = layered.cut_batch(batch)
    for layer in layered.build(range(layered.n_layers)):
        value = layer.train()(value)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(value["loss"], model(**batch).loss)
    assert torch.equal(after, torch.get_rng_state())


class Scaled(torch.nn.Module):
    """A rotary table that depends on more than the batch."""

    def __init__(self, table: Any, kind: str) -> None:
        super().__init__()
        self.table, self.kind = table, kind
        if kind != "hidden state":
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        by = hidden.detach().abs().sum() if self.kind == "hidden state" else self.scale
        by = by if self.kind == "weight" else by.detach()
        return tuple(by * x for x in self.table(hidden, *args, **kwargs))


@pytest.mark.parametrize("kind", ["weight", "detached weight", "hidden state"])
def test_blocks_that_read_more_than_the_batch_are_refused(kind: str) -> None:
    model = tiny("llama")
    model.model.rotary_emb = Scaled(model.model.rotary_emb, kind)
    with pytest.raises(RequestError, match="compute from their weights"):
        layered_of(model)


def test_a_batch_that_is_no_dict_or_has_no_labels_is_refused() -> None:
    layered = layered_of(tiny("llama"))
    with pytest.raises(RequestError, match="takes a dict with input_ids"):
        layered.cut_batch(torch.zeros(2, 3))
    with pytest.raises(RequestError, match="needs labels in the batch"):
        layered.loss_fn({}, None)


@pytest.mark.slow
def test_the_resumed_example_equals_the_uninterrupted_run(
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
