"""Layers of models of transformers: what they are given, and families of one's own."""

import pytest
import torch
from tiny_hf import ENCODER_DECODERS, batch_of, tiny

from zbpp import RequestError
from zbpp.models import Family, cut, layered_of, register

pytest.importorskip("transformers")

SOME = ["llama", "gemma3", pytest.param("t5", marks=pytest.mark.slow)]
"""`test_hf_pipelines` compares losses, gradients and predictions of all families."""


@pytest.mark.parametrize("family", SOME)
def test_masks_and_tables_follow_from_the_batch_and_an_encoders_states_do_not(family):
    layered, batch = layered_of(tiny(family)), batch_of(family)
    (first,) = layered.build(range(1))
    travels = "shared" in first(layered.cut_batch(batch)[0])
    assert travels == (family in ENCODER_DECODERS)


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


def test_a_batch_that_is_no_dict_or_has_no_labels_is_refused():
    layered = layered_of(tiny("llama"))
    with pytest.raises(RequestError, match="takes a dict with input_ids"):
        layered.cut_batch(torch.zeros(2, 3))
    with pytest.raises(RequestError, match="needs labels in the batch"):
        layered.loss_fn({}, None)
