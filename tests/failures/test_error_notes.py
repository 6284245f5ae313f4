"""An error in a layer says where it was raised; the user's own error stays."""

import pytest
import torch
from torch import Tensor, nn

import zbpp
from zbpp import diagnostics
from zbpp.models import cut

D = 4


class Fails(nn.Module):
    """Fails in the forward of the micro-batch of fives."""

    def __init__(self, when: str = "never") -> None:
        super().__init__()
        self.linear, self.when = nn.Linear(D, D), when

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "forward" and bool((x == 5).any()):
            raise KeyError("mine")
        return self.linear(x)


class Block(nn.Module):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.mlp = Fails(when)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class Model(nn.Module):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.embed = nn.Identity()
        self.blocks = nn.ModuleList(
            Block(when if i == 1 else "never") for i in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def notes_of(error: type[Exception], model: object, **more: object) -> list[str]:
    inputs = torch.zeros(4, D)
    inputs[2:] = 5
    settings = {"loss_fn": nn.functional.mse_loss, "schedule": "1F1B"} | more
    pipeline = zbpp.Pipeline(
        model, optimizer=None, n_stages=1, n_microbatches=2, **settings
    )
    with pytest.raises(error) as caught:
        pipeline.step(inputs, inputs)
    return caught.value.__notes__


def test_an_error_of_a_forward_names_the_module_chunk_and_micro_batch():
    model = Model("forward")
    for block in model.blocks:
        nn.init.eye_(block.mlp.linear.weight)
        nn.init.zeros_(block.mlp.linear.bias)
    notes = notes_of(KeyError, cut(model, "blocks", example=torch.zeros(2, D)))
    assert notes[-2:] == [
        "in 0F1",
        "0F1 is the forward of micro-batch 1 in chunk 0, layers 0 to 5",
    ]
    assert notes[0].startswith("raised in blocks.1.mlp (layer 2)")
    assert "'hidden': float32[2, 4]" in notes[0]


def test_an_error_of_a_backward_names_the_pass_and_a_recomputed_layer():
    has_loss = []

    class FailsAgain(Fails):
        def forward(self, x: Tensor) -> Tensor:
            if has_loss:
                raise KeyError("mine")
            return self.linear(x)

    def loss_fn(y: Tensor, t: Tensor) -> Tensor:
        has_loss.append(True)
        return nn.functional.mse_loss(y, t)

    layers = nn.Sequential()
    layers.add_module("first", Fails())
    layers.add_module("second", FailsAgain())
    plan = zbpp.plan_model(
        layers, "1F1B", n_stages=1, n_microbatches=2, recompute="all"
    )
    notes = "\n".join(notes_of(KeyError, layers, schedule=plan, loss_fn=loss_fn))
    assert "BW0 is the backward of micro-batch 0 in chunk 0, layers 0 to 1" in notes
    assert "raised in second (layer 1)" in notes


def test_a_tuple_for_a_layer_of_two_arguments_gets_the_way_out():
    class Splits(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    class Adds(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    notes = notes_of(TypeError, [Fails(), Splits(), Adds()])
    assert "layers.2 (layer 2); the layer was called with (float32[2, 4], " in notes[0]
    assert "one argument, a tuple too" in notes[1]
    shapes = "\n".join(notes_of(RuntimeError, [nn.Linear(D, 9), nn.Linear(8, D)]))
    assert "one argument" not in shapes and "float32[2, 9]" in shapes


def test_reports_have_the_models_own_names():
    def names(model: object) -> set[str]:
        with zbpp.Pipeline(
            model, "ZBH1", loss_fn=nn.functional.mse_loss, optimizer=None,
            n_stages=2, n_microbatches=2,
        ) as pipeline:  # fmt: skip
            pipeline.step(torch.ones(4, D), torch.ones(4, D))
            return set(diagnostics.split_report(pipeline))

    whole = Model("never")
    own = {name for name, _ in whole.named_parameters()}
    assert names(cut(whole, "blocks", example=torch.zeros(2, D))) == own
    sequential = nn.Sequential(*whole.blocks)
    assert names(sequential) == {name for name, _ in sequential.named_parameters()}
    assert "layers.3.mlp.linear.weight" in names(list(whole.blocks))
