import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from zbpp.core import RequestError
from zbpp.training.llama import (
    LlamaConfig,
    build_layer,
    build_layers,
    cross_entropy,
)

TINY = LlamaConfig(dim=16, n_blocks=2, n_heads=2, hidden=32, seq=12)


def whole(config: LlamaConfig) -> nn.Sequential:
    return nn.Sequential(*build_layers(config, range(config.n_layers)))


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


def test_the_default_model_has_ten_layers_and_about_a_million_parameters():
    model = whole(LlamaConfig())
    assert len(model) == LlamaConfig().n_layers == 10
    assert sum(p.numel() for p in model.parameters()) == 935_520


def test_shorter_sequences_are_taken():
    logits = whole(TINY)(tokens(3, 12))
    torch.testing.assert_close(whole(TINY)(tokens(3, 12)[:, :5]), logits[:, :5])


def test_a_layer_does_not_depend_on_which_others_are_built():
    together = build_layers(TINY, range(TINY.n_layers))
    torch.manual_seed(123)
    alone = [build_layer(TINY, index) for index in reversed(range(TINY.n_layers))]
    for one, other in zip(together, reversed(alone), strict=True):
        for (name, p), q in zip(
            one.named_parameters(), other.parameters(), strict=True
        ):
            assert torch.equal(p, q), name


def test_layers_and_seeds_differ():
    def weight(index, **changed):
        config = LlamaConfig(dim=16, n_heads=2, hidden=32, **changed)
        return build_layer(config, index).attention.query.weight

    assert not torch.equal(weight(1), weight(2))
    assert not torch.equal(weight(1), weight(1, seed=1))
    assert torch.equal(weight(1), weight(1))


def test_building_leaves_the_global_random_stream_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    whole(TINY)
    assert torch.equal(torch.rand(3), expected)


def test_all_matrices_are_in_linears_without_bias():
    matrices = 0
    for module in whole(TINY).modules():
        if isinstance(module, nn.Linear):
            assert module.bias is None
            matrices += 1
        own = [p.dim() for p in module.parameters(recurse=False)]
        if not isinstance(module, nn.Linear | nn.Embedding):
            assert all(dim == 1 for dim in own)
    assert matrices == 2 * 7 + 1


def change_of_logits(model: nn.Module, position: int) -> torch.Tensor:
    """By position: how far the logits move when the token at one position changes."""
    before = tokens(1, 12)
    after = before.clone()
    after[0, position] = (after[0, position] + 1) % 256
    return (model(after) - model(before)).abs().amax(dim=(0, 2))


def test_no_position_sees_a_later_one():
    change = change_of_logits(whole(TINY), 7)
    assert (change[:7] == 0).all()
    assert (change[7:] > 0).all()


def test_the_causality_test_would_see_a_leak(monkeypatch):
    attend = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda q, k, v, is_causal: attend(q, k, v, is_causal=False),
    )
    assert (change_of_logits(whole(TINY), 7)[:7] > 0).all()


def test_attention_depends_on_distance_not_on_place():
    attention = build_layer(TINY, 1).attention
    first, second = torch.randn(2, 1, 2, 12, 8, generator=torch.manual_seed(0))
    first, second = first[:, :, :1].expand_as(first), second[:, :, :1].expand_as(second)
    scores = attention._rotate(first) @ attention._rotate(second).transpose(-1, -2)
    for distance in (0, 1, 5):
        diagonal = scores.diagonal(-distance, dim1=-2, dim2=-1)
        torch.testing.assert_close(diagonal, diagonal[..., :1].expand_as(diagonal))
    assert not torch.allclose(scores[..., 5, 0], scores[..., 0, 0])


def test_the_first_loss_is_that_of_guessing_and_the_stream_keeps_its_scale():
    config = LlamaConfig()
    model = whole(config)
    inputs = tokens(4, 64)
    with torch.no_grad():
        assert cross_entropy(model(inputs), inputs) == pytest.approx(
            math.log(256), abs=0.1
        )
        stream = model[:-1](inputs)
    assert 0.7 < stream.std() < 2.0


def test_the_loss_is_the_mean_over_tokens():
    logits = torch.randn(2, 3, 256, generator=torch.manual_seed(0))
    targets = tokens(2, 3)
    by_hand = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(cross_entropy(logits, targets), by_hand)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 0}, "dim is 0; at least 1"),
        ({"n_blocks": 0}, "n_blocks is 0"),
        ({"dim": 30, "n_heads": 4}, "dim 30 is no multiple of 2 \\* n_heads = 8"),
    ],
)
def test_sizes_that_cannot_be_are_refused(sizes, message):
    with pytest.raises(RequestError, match=message):
        LlamaConfig(**sizes)


def test_a_layer_that_does_not_exist_is_refused():
    with pytest.raises(RequestError, match="layer 4: the layers are 0 to 3"):
        build_layer(TINY, 4)
