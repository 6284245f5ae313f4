"""Models of transformers on the meta device: each process makes its own layers only."""

import pytest
import torch
from tiny_hf import batch_of, tiny

import zbpp
from zbpp import RequestError
from zbpp.models import layered_of

pytestmark = [pytest.mark.needs("transformers"), pytest.mark.xdist_group("hf")]

SOME = [
    "gpt2",
    "gemma3",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "t5", "vit")),
]
"""Tied ends, tables in buffers, experts, an encoder, images."""


def on_meta(family):
    with torch.device("meta"):
        return tiny(family)


def tensors(layered, ranges):
    """Parameters and buffers, those of no checkpoint included, by own name."""
    return {
        layered.own_name(layers[i], name): tensor
        for layers in ranges
        for i, layer in enumerate(layered.build(layers))
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
    }


def loss_of(layered, batch):
    value, targets = layered.cut_batch(batch)
    for layer in layered.build(range(layered.n_layers)):
        value = layer(value)
    return layered.loss_fn(value, targets)


@pytest.mark.parametrize("family", SOME)
def test_a_seed_gives_the_same_weights_for_any_number_of_stages(family):
    layered = zbpp.cut(on_meta(family), weights=5)
    at_once = tensors(layered, [range(6)])
    in_parts = tensors(layered, [range(4, 6), range(1, 4), range(1)])
    assert at_once.keys() == in_parts.keys()
    assert all(torch.equal(at_once[name], in_parts[name]) for name in at_once)
    assert not any(t.isnan().any() for t in at_once.values() if t.is_floating_point())
    other = tensors(zbpp.cut(on_meta(family), weights=6), [range(6)])
    drawn = [name for name, t in at_once.items() if not torch.equal(t, other[name])]
    assert any("embed" in n or "wte" in n for n in drawn)
    assert f"{_a_matrix(at_once)}" in drawn


def _a_matrix(found):
    return next(n for n, t in found.items() if t.dim() == 2 and ".1." in n)


@pytest.mark.parametrize("family", SOME)
def test_a_seed_draws_from_the_distributions_of_a_plain_model(family):
    plain = {n: p.detach() for n, p in tiny(family).named_parameters()}
    ours = tensors(zbpp.cut(on_meta(family), weights=5), [range(6)])
    for name, expected in plain.items():
        found = ours[name].detach()
        assert found.shape == expected.shape
        if expected.std() == 0 or expected.numel() == 1:
            assert torch.equal(found, expected), name
        else:
            ratio = float(found.std() / expected.std())
            assert abs(ratio - 1) < 4 / expected.numel() ** 0.5 + 0.1, name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "vit"])
def test_a_checkpoint_with_other_names_is_refused(family, tmp_path):
    tiny(family).save_pretrained(tmp_path)
    layered = zbpp.cut(on_meta(family), weights=tmp_path)
    with pytest.raises(RequestError, match=r"no tensor .*from_pretrained and cut it"):
        layered.build(range(layered.n_layers))


@pytest.mark.parametrize(
    "family", ["gpt2", "gemma3", pytest.param("t5", marks=pytest.mark.slow)]
)
def test_a_folder_of_safetensors_gives_the_plain_model(family, tmp_path):
    plain = tiny(family).eval()
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    batch = batch_of(family)
    with torch.device("meta"):
        model = tiny(family).eval()
    layered = zbpp.cut(model, weights=tmp_path)
    assert torch.equal(loss_of(layered, batch), plain(**batch).loss)
    state = zbpp.cut(model, weights=plain.state_dict())
    assert torch.equal(loss_of(state, batch), plain(**batch).loss)


def test_a_model_on_meta_without_weights_is_refused(tmp_path):
    with pytest.raises(RequestError, match=r"on the meta device.*zbpp\.cut\(model, w"):
        layered_of(on_meta("gpt2"))
    with pytest.raises(RequestError, match="holds no safetensors files"):
        zbpp.cut(on_meta("gpt2"), weights=tmp_path)


def test_only_the_layers_asked_for_are_made():
    layered = zbpp.cut(on_meta("llama"), weights=1)
    before = layered.build(range(2, 3))
    (layer,) = before
    assert not any(t.is_meta for t in (*layer.parameters(), *layer.buffers()))
    names = [name for name, _ in layer.named_parameters()]
    assert all(name.startswith("block.") for name in names)


def test_a_tied_model_on_meta_stays_tied():
    with zbpp.Pipeline(
        zbpp.cut(on_meta("gpt2"), weights=3),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        schedule="ZBV",
        n_stages=2,
        n_microbatches=4,
    ) as pipeline:
        losses = [pipeline.step(batch_of("gpt2", 8, seed=s)).loss for s in range(3)]
        state = pipeline.state_dict()["model"]
    assert torch.equal(state["transformer.wte.weight"], state["lm_head.weight"])
    assert losses[-1] < losses[0]
