"""Operations of layers, by hand."""

import json

import pytest
import torch
from torch import Tensor, nn

from zbpp.memory.fake import building, fake_mode
from zbpp.memory.layers import model_memory
from zbpp.training.user_model import load_model

BATCH, SEQ, WIDTH, HEADS = 2, 16, 32, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(BATCH, SEQ, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(*parts)
        return y.transpose(1, 2).flatten(2)


def operations(*layers: nn.Module) -> list[float]:
    x = torch.zeros(BATCH, SEQ, WIDTH)
    memory = model_memory(list(layers), (x, x), nn.functional.mse_loss)
    return memory.operations()


def test_products_and_attention_by_hand() -> None:
    tokens = BATCH * SEQ
    found = operations(nn.Linear(WIDTH, WIDTH), Attention(), nn.Tanh())
    scores = 2 * BATCH * SEQ * SEQ * WIDTH  # of all heads; and as many for the values
    assert found == [
        2 * tokens * WIDTH * WIDTH,
        2 * tokens * WIDTH * 3 * WIDTH + 2 * scores,
        0,
    ]


CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


@pytest.mark.slow
def test_models_of_transformers_by_hand(tmp_path) -> None:
    pytest.importorskip("transformers")
    tokens = 2 * 128
    attention = 2 * tokens * (2 * 64 * 64 + 2 * 64 * 32) + 2 * 2 * 2 * 128 * 128 * 64
    feed = 2 * tokens * 3 * 64 * 128
    router = 2 * tokens * 64 * 8
    config = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, **CONFIG}))
    with building(fake_mode()):
        user = load_model(f"hf:{tmp_path / 'config.json'}", is_fake=True)
    batch = (user.inputs, user.targets)
    memory = model_memory(user.model, batch, user.loss_fn, n_layers=user.n_layers)
    block, head = attention + 2 * feed + router, 2 * tokens * 64 * 256
    assert memory.operations() == [0, block, block, head]
