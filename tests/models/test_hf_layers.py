"""Layers of models of transformers, run one after another, against the whole model."""

import copy

import pytest
import torch
from tiny_hf import ENCODER_DECODERS, batch_of, tiny

from zbpp import RequestError
from zbpp.models import Family, cut, layered_of, register

pytest.importorskip("transformers")

SOME = ["llama", "gemma3", pytest.param("t5", marks=pytest.mark.slow)]
"""`test_hf_pipelines` has all families, and gradients."""


def run(layered, layers, batch):
    value, targets = layered.cut_batch(batch)
    for layer in layers:
        value = layer(value)
    return layered.loss_fn(value, targets), value


@pytest.mark.parametrize("family", SOME)
def test_layers_in_turn_are_the_model_to_the_bit(family):
    model = tiny(family)
    plain, batch = copy.deepcopy(model), batch_of(family)
    layered = layered_of(model)
    layers = layered.build(range(layered.n_layers))
    for step in range(2):
        batch = batch_of(family, seed=step, length=10 + step)
        expected = plain(**batch)
        loss, value = run(layered, layers, batch)
        assert torch.equal(loss, expected.loss)
        assert torch.equal(value["logits"], expected.logits)
    # masks and tables follow from the batch, an encoder's states do not
    travels = "shared" in layers[0](layered.cut_batch(batch)[0])
    assert travels == (family in ENCODER_DECODERS)


def test_eval_mode_and_a_batch_without_labels():
    model = tiny("llama").eval()
    layered = layered_of(model)
    value, _ = layered.cut_batch({k: batch_of("llama")[k] for k in ("input_ids",)})
    expected = model(**value)
    for layer in layered.build(range(layered.n_layers)):
        value = layer(value)
    assert torch.equal(value["logits"], expected.logits)
    with pytest.raises(RequestError, match="needs labels in the batch"):
        layered.loss_fn(value, None)


def test_a_cut_of_ones_own_is_the_registered_one():
    model = tiny("gpt2")
    registered, own = layered_of(model), cut(model, "transformer.h")
    assert own.ties == registered.ties
    assert len(own.ties) == 1
    for index in (0, registered.n_layers - 1):
        names = [
            [
                name
                for name, _ in layered.build(range(index, index + 1))[
                    0
                ].named_parameters()
            ]
            for layered in (registered, own)
        ]
        assert names[0] == names[1]


def test_a_family_that_is_not_known_is_refused_until_it_is_registered(monkeypatch):
    model = tiny("gpt2")
    monkeypatch.setattr(type(model.config), "model_type", "mine")
    with pytest.raises(RequestError, match=r"no family is registered.*zbpp\.cut"):
        layered_of(model)
    register("mine", Family("h", ("wte", "wpe", "drop"), ("ln_f",)))
    assert layered_of(model).n_layers == 6


def test_a_batch_that_is_no_dict_is_refused():
    with pytest.raises(RequestError, match="takes a dict with input_ids"):
        layered_of(tiny("llama")).cut_batch(torch.zeros(2, 3))
