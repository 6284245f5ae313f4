"""An error in a layer names its place; the user's error stays."""

import pytest
import small
import torch
from torch import Tensor, nn

import zbpp

D = 4


class Fails(nn.Module):
    """Fails in the forward of the micro-batch of fives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.linear.requires_grad_(False).weight.copy_(torch.eye(D))
        self.linear.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == 5).any()):
            raise KeyError("mine")
        return self.linear(x)


def notes_of(error: type[Exception], model: object, **more: object) -> list[str]:
    inputs = torch.zeros(4, D)
    inputs[2:] = 5
    settings = {"schedule": "1F1B", "n_stages": 1, "n_microbatches": 2} | more
    pipeline = small.make(model, optimizer=None, **settings)
    with pytest.raises(error) as caught:
        pipeline.step(inputs, inputs)
    return caught.value.__notes__


def test_an_error_of_a_forward_names_the_module_chunk_and_micro_batch():
    blocks = [nn.Sequential(Fails()) for _ in range(3)]
    notes = notes_of(KeyError, nn.Sequential(nn.Dropout(0.0), *blocks))
    assert notes[-2:] == [
        "in 0F1",
        "0F1 is the forward of micro-batch 1 in chunk 0, layers 0 to 3",
    ]
    assert notes[0].startswith("raised in layers.1 (layer 1)")
    assert "float32[2, 4]" in notes[0]


def test_an_error_of_a_backward_names_the_pass_and_a_recomputed_layer():
    has_loss = []

    class FailsAgain(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if has_loss:
                raise KeyError("mine")
            return super().forward(x)

    def loss_fn(y: Tensor, t: Tensor) -> Tensor:
        has_loss.append(True)
        return nn.functional.mse_loss(y, t)

    layers = [nn.Linear(D, D), FailsAgain(D, D)]
    plan = zbpp.plan_model(
        layers, "1F1B", n_stages=1, n_microbatches=2, recompute="all"
    )
    notes = "\n".join(notes_of(KeyError, layers, schedule=plan, loss_fn=loss_fn))
    assert "BW0 is the backward of micro-batch 0 in chunk 0, layers 0 to 1" in notes
    assert "raised in layers.1 (layer 1)" in notes


def test_a_tuple_for_a_layer_of_two_arguments_gets_a_hint():
    class Splits(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), x

    notes = notes_of(TypeError, [Splits(D, D), nn.Bilinear(D, D, D)])
    assert "layers.1 (layer 1); the layer was called with (float32[2, 4], " in notes[0]
    assert "one argument, a tuple too" in notes[1]
    shapes = "\n".join(notes_of(RuntimeError, [nn.Linear(D, 9), nn.Linear(8, D)]))
    assert "one argument" not in shapes and "float32[2, 9]" in shapes
