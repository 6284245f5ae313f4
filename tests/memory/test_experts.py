"""Experts whose shapes follow from the routing, which is taken as even."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from allocator import worst
from torch import Tensor, nn
from torch.nn import functional

from zbpp.core import RequestError
from zbpp.memory import layer_memory, routing

WIDTH, ROWS, N = 64, 512, 4

Run = Callable[[Any, Tensor, Tensor], Tensor]


def by_where(self: "Experts", x: Tensor, chosen: Tensor) -> Tensor:
    """As the experts of transformers: one after the other, those that are hit."""
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = functional.one_hot(chosen, N).permute(2, 1, 0)
        hit = (mask.sum(dim=(-1, -2)) > 0).nonzero()
    for (expert,) in hit:
        if expert == N:
            continue
        _, rows = torch.where(mask[expert])
        y = self.expert(x[rows], self.up[expert], self.down[expert])
        out.index_add_(0, rows, y)
    return out


def by_masks(self: "Experts", x: Tensor, chosen: Tensor) -> Tensor:
    """Boolean indices."""
    out = torch.zeros_like(x)
    for expert in range(N):
        mask = (chosen == expert).any(1)
        y = self.expert(x[mask], self.up[expert], self.down[expert])
        out = out.index_put((mask.nonzero().squeeze(1),), y, accumulate=True)
    return out


def by_counts(self: "Experts", x: Tensor, chosen: Tensor) -> Tensor:
    """Rows sorted by experts, and cut by their counts."""
    flat = chosen.flatten()
    order = flat.argsort()
    counts = torch.bincount(flat, minlength=N).tolist()
    parts = x[order // 2].split(counts)
    weights = zip(self.up, self.down, strict=True)
    pairs = zip(parts, weights, strict=True)
    y = torch.cat([self.expert(part, *own) for part, own in pairs])
    return torch.zeros_like(x).index_add(0, order // 2, y)


class Experts(nn.Module):
    """Two of four experts for each row; the first columns are the scores."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(N, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(N, WIDTH, 2 * WIDTH))
        self.run = run

    def expert(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return functional.linear(functional.silu(functional.linear(x, up)), down)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, :N].softmax(-1).topk(2, dim=-1)[1]
        return x + self.run(self, x, chosen)


def routed(run: Run) -> Any:
    """Layers, and rows that are really dealt evenly."""
    x = torch.randn(ROWS, WIDTH)
    first = 2 * torch.arange(ROWS) % N
    x[:, :N] = functional.one_hot(first, N) + functional.one_hot(first + 1, N)
    layers = [nn.Identity(), Experts(run), nn.Linear(WIDTH, WIDTH)]
    return layers, (x, x), functional.mse_loss


@pytest.mark.parametrize("run", [by_where, by_masks, by_counts])
def test_experts_take_what_even_routing_takes(run: Run) -> None:
    assert worst(routed(run), range(1, 3))[0] < 0.02


def test_numbers_that_are_not_kept_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing.IntegerNumbers, "_choose", lambda *_: None)
    layers, batch, loss = routed(by_where)
    with pytest.raises(RequestError, match=r"layer 1 \(a Experts\).*_experts_impl"):
        layer_memory(layers, batch, loss)


def test_a_tensor_that_unknown_numbers_change_is_not_known_any_more() -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(len(x))
            places[:1] = (x[:1, 0] > 0).long()  # nobody knows
            return x[places > 1]

    layers = [nn.Linear(WIDTH, WIDTH), Changing()]
    x = torch.randn(8, WIDTH)
    with pytest.raises(RequestError, match=r"layer 1 \(a Changing\)"):
        layer_memory(layers, (x, x), lambda y, t: y.sum())


class Decoder(nn.Module):
    """A decoder layer of transformers' Mixtral, with its rotary embedding."""

    def __init__(self, config: Any, index: int) -> None:
        from transformers.models.mixtral import modeling_mixtral as mixtral

        super().__init__()
        self.layer = mixtral.MixtralDecoderLayer(config, index)
        self.rotary = mixtral.MixtralRotaryEmbedding(config)
        for parameter in self.layer.mlp.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        embedded = self.rotary(x, places)
        out = self.layer(x, position_embeddings=embedded, position_ids=places)
        y: Tensor = out[0] if isinstance(out, tuple) else out
        return y


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eager", "grouped_mm"])
def test_mixtral_takes_what_the_allocator_says(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=2, num_local_experts=4,
        vocab_size=128, max_position_embeddings=256,
    )  # fmt: skip
    config._attn_implementation, config._experts_implementation = "sdpa", kind
    torch.manual_seed(0)
    blocks = [Decoder(config, index) for index in range(2)]
    layers = [nn.Embedding(128, 64), *blocks, nn.Linear(64, 128)]
    tokens = torch.randint(0, 128, (4, 128))

    def loss(y: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(y.flatten(0, 1), targets.flatten())

    assert worst((layers, (tokens, tokens), loss), range(1, 3))[0] < 0.02
