"""Models of transformers on the meta device: each process makes only its layers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_hf import batch_of, tiny
from torch import Tensor, nn

import zbpp
from zbpp import RequestError
from zbpp.models import Layered, layered_of

pytestmark = pytest.mark.needs("transformers")

SOME = [
    "gpt2",
    "gemma3",
    pytest.param("mixtral", marks=pytest.mark.slow),
]
"""Tied ends, tables in buffers, experts."""


def on_meta(family: str) -> Any:
    with torch.device("meta"):
        return tiny(family)


def tensors(layered: Layered, ranges: Sequence[range]) -> dict[str, Tensor]:
    """Parameters and buffers, those of no checkpoint included, by name."""
    return {
        layered.own_name(layers[i], name): tensor
        for layers in ranges
        for i, layer in enumerate(layered.build(layers))
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
    }


def loss_of(layered: Layered, batch: Any) -> Tensor:
    value, targets = layered.cut_batch(batch)
    for layer in layered.build(range(layered.n_layers)):
        value = layer(value)
    loss: Tensor = layered.loss_fn(value, targets)
    return loss


@pytest.mark.parametrize("family", SOME)
def test_a_seed_draws_what_a_plain_model_draws_for_any_stages(family: str) -> None:
    """The same weights for any cut, of the distributions of the plain model."""
    layered = zbpp.cut(on_meta(family), weights=5)
    at_once = tensors(layered, [range(6)])
    in_parts = tensors(layered, [range(4, 6), range(1, 4), range(1)])
    assert at_once.keys() == in_parts.keys()
    for name, tensor in at_once.items():
        assert torch.equal(tensor, in_parts[name]) and not tensor.is_meta, name
        assert not tensor.is_floating_point() or not tensor.isnan().any(), name
    other = tensors(zbpp.cut(on_meta(family), weights=6), [range(6)])
    for name, p in tiny(family).named_parameters():
        found, expected = at_once[name].detach(), p.detach()
        assert found.shape == expected.shape
        if expected.std() == 0 or expected.numel() == 1:
            assert torch.equal(found, expected), name
        else:
            ratio = float(found.std() / expected.std())
            assert abs(ratio - 1) < 4 / expected.numel() ** 0.5 + 0.1, name
            assert not torch.equal(found, other[name]), name


@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_a_folder_of_safetensors_gives_the_plain_model(
    family: str, tmp_path: Path
) -> None:
    plain, batch = tiny(family).eval(), batch_of(family)
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = on_meta(family).eval()
    for weights in (tmp_path, plain.state_dict()):
        layered = zbpp.cut(model, weights=weights)
        assert torch.equal(loss_of(layered, batch), plain(**batch).loss)
    assert all(p.is_meta for p in model.parameters())


class Scale(nn.Module):
    """Has a parameter that no rule of the model initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"on the meta device.*zbpp\.cut\(model, w"):
        layered_of(on_meta("gpt2"))
    with pytest.raises(RequestError, match="contains no safetensors files"):
        zbpp.cut(on_meta("gpt2"), weights=tmp_path)
    tiny("mixtral").save_pretrained(tmp_path)  # under other names
    layered = zbpp.cut(on_meta("mixtral"), weights=tmp_path)
    with pytest.raises(RequestError, match=r"no tensor .*from_pretrained and cut it"):
        layered.build(range(layered.n_layers))
    state = tiny("gpt2").state_dict()
    state["transformer.ln_f.weight"] = torch.ones(3)
    layered = zbpp.cut(on_meta("gpt2"), weights=state)
    with pytest.raises(RequestError, match=r"ln_f\.weight has the shape \(3,\)"):
        layered.build(range(layered.n_layers))
    model = on_meta("gpt2")
    model.transformer.ln_f = Scale()
    layered = zbpp.cut(model, weights=1)
    with pytest.raises(RequestError, match=r"ln_f\.scale has no initialisation"):
        layered.build(range(layered.n_layers))


def test_a_tied_model_on_meta_stays_tied() -> None:
    with zbpp.Pipeline(
        zbpp.cut(on_meta("gpt2"), weights=3), "ZBV", n_stages=2, n_microbatches=4,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    ) as pipeline:  # fmt: skip
        losses = [pipeline.step(batch_of("gpt2", 8, seed=s)).loss for s in range(3)]
        state = pipeline.state_dict()["model"]
    assert torch.equal(state["transformer.wte.weight"], state["lm_head.weight"])
    assert losses[-1] < losses[0]
