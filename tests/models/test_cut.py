"""Modules cut at their blocks by export; nothing of transformers is loaded."""

import copy
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbpp
from zbpp import RequestError
from zbpp.models import Layered, cut, layered_of

D = 8


class Block(nn.Module):
    def __init__(self, returns: str = "tensor") -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.returns = returns

    def forward(self, hidden: Tensor, bias: Any, scale: Any = 1.0) -> Any:
        out = hidden + self.linear(torch.tanh(hidden) + bias) * scale
        return (out, None) if self.returns == "tuple" else out


class Encoder(nn.Module):
    """A learned position, a bias that every block reads, and a tied head."""

    def __init__(self, returns: str = "tensor") -> None:
        super().__init__()
        self.embed = nn.Embedding(16, D)
        self.position = nn.Parameter(torch.randn(6, D))
        self.bias = nn.Linear(D, D)
        blocks = nn.ModuleList(Block(returns) for _ in range(4))
        self.body = nn.ModuleDict({"blocks": blocks})
        self.norm = nn.LayerNorm(D)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) + self.position[: ids.shape[1]]
        bias = self.bias(hidden)
        for block in self.body["blocks"]:
            hidden = block(hidden, bias, scale=self.scale)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        logits: Tensor = self.norm(hidden) @ self.embed.weight.t()
        return logits


class InADict(Encoder):
    """Has its blocks in a dictionary, as torchtitan's models have."""

    def __init__(self) -> None:
        super().__init__()
        self.body["blocks"] = nn.ModuleDict({str(i): Block() for i in range(4)})

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) + self.position[: ids.shape[1]]
        bias = self.bias(hidden)
        for block in self.body["blocks"].values():
            hidden = block(hidden, bias)
        logits: Tensor = self.norm(hidden) @ self.embed.weight.t()
        return logits


class ChainedBlock(Block):
    """Puts out a bias in addition to the hidden state; makes it if it gets none."""

    def forward(self, hidden: Tensor, bias: Any = None, scale: Any = 1.0) -> Any:
        bias = torch.tanh(self.linear(hidden)) if bias is None else bias
        return hidden + self.linear(hidden + bias), bias


class Chained(Encoder):
    """Each block gets the bias that the one before has put out, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList(ChainedBlock() for _ in range(4))
        self.body = nn.ModuleDict({"blocks": blocks})
        del self.bias, self.position

    def forward(self, ids: Tensor) -> Tensor:
        hidden, bias = self.embed(ids), None
        for block in self.body["blocks"]:
            hidden, bias = block(hidden, bias)
        logits: Tensor = self.norm(hidden) @ self.embed.weight.t()
        return logits


class Dropping(Encoder):
    """Draws before its blocks, in a module that may be named or not."""

    def __init__(self) -> None:
        super().__init__()
        del self.bias, self.position
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.drop(self.embed(ids))
        for block in self.body["blocks"]:
            hidden = block(hidden, 0.0)
        logits: Tensor = self.norm(hidden) @ self.embed.weight.t()
        return logits


IDS = torch.arange(12).reshape(2, 6)
PATH = "body.blocks"


def run(layered: Layered, value: Any = IDS, *, training: bool = True) -> Any:
    """Pass a value through all layers."""
    for layer in layered.build(range(layered.n_layers)):
        value = layer.train(training)(value)
    return value


class Skip(Encoder):
    """The head reads what the embedding has put out."""

    def forward(self, ids: Tensor) -> Tensor:
        first = hidden = self.embed(ids)
        for block in self.body["blocks"]:
            hidden = block(hidden, 0.0) + 1.0
        return (hidden + first) @ self.embed.weight.t()


class Twice(Encoder):
    """Runs its first block once more at the end."""

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for block in (*self.body["blocks"], self.body["blocks"][0]):
            hidden = block(hidden, 0.0)
        return hidden @ self.embed.weight.t()


class Shifted(Encoder):
    """Makes other constants in training and in evaluation."""

    def forward(self, ids: Tensor) -> Tensor:
        shift = torch.tensor([1.0, 2.0] if self.training else [3.0, 4.0])
        logits: Tensor = super().forward(ids) + shift.sum()
        return logits


class Normed(nn.Module):
    """Nothing runs before or after its blocks, which have buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Embedding(16, 16), nn.BatchNorm1d(6))
            if i == 0
            else nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(6), nn.Dropout(0.5))
            for i in range(3)
        )

    def forward(self, ids: Tensor) -> Tensor:
        for block in self.blocks:
            ids = block(ids)
        return ids


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        Encoder,
        lambda: Encoder("tuple"),
        InADict,
        Chained,
        Skip,
        Twice,
        Shifted,
        Dropping,
        Normed,
    ],
)
def test_a_module_is_cut_to_the_bit_under_the_names_of_the_model(
    make: Callable[[], nn.Module], training: bool
) -> None:
    model = make().train(training)
    plain = copy.deepcopy(model)
    path = "blocks" if isinstance(model, Normed) else PATH
    layered = cut(model, path, example=IDS)
    assert all(part.training is training for part in model.modules())
    torch.manual_seed(1)
    value = run(layered, training=training)
    torch.manual_seed(1)
    expected = plain(IDS)
    assert torch.equal(value, expected)
    value.square().mean().backward()
    expected.square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is q.grad or torch.allclose(p.grad, q.grad, rtol=1e-6), name
        assert p.grad is None or name.startswith("embed") or torch.equal(p.grad, q.grad)
    for b, c in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(b, c)
    layers = layered.build(range(layered.n_layers))
    names = {
        layered.own_name(index, name)
        for index, layer in enumerate(layers)
        for name in layer.state_dict()
    }
    assert names == model.state_dict().keys()


@pytest.mark.parametrize("mode", ["ZBH1", "ZBV"])
def test_a_pipeline_of_a_skip_trains_as_the_plain_model(mode: str) -> None:
    model = Skip()
    plain = copy.deepcopy(model)
    ids, targets = IDS.repeat(4, 1), torch.randn(8, 6, 16)
    with zbpp.Pipeline(
        cut(model, PATH, example=IDS), mode, optimizer=None, n_stages=2,
        n_microbatches=4, loss_fn=nn.functional.mse_loss,
    ) as pipeline:  # fmt: skip
        losses = pipeline.step(ids, targets).losses
    for part, target, loss in zip(ids.chunk(4), targets.chunk(4), losses, strict=True):
        expected = nn.functional.mse_loss(plain(part), target)
        assert float(expected.detach()) == loss
        (expected / 4).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)


def test_buffers_above_the_blocks_are_saved_once_and_loaded() -> None:
    def state_and_loss(model: nn.Module, state: Any = None) -> tuple[Any, float]:
        with zbpp.Pipeline(
            cut(model, PATH, example=IDS[:1]), "1F1B", optimizer=None, n_stages=2,
            n_microbatches=2, loss_fn=nn.functional.mse_loss,
        ) as pipeline:  # fmt: skip
            if state is not None:
                pipeline.load_state_dict(state)
            loss = pipeline.evaluate(IDS, torch.zeros(2, 6, 16))
            return copy.deepcopy(pipeline.state_dict()), loss

    model = Encoder()
    model.scale.fill_(0.25)
    state, loss = state_and_loss(model)
    assert state["model"].keys() == model.state_dict().keys()
    assert state_and_loss(Encoder(), state)[1] == loss
    state["model"]["scale"] += 1.0
    assert state_and_loss(Encoder(), state)[1] != loss


class Recomputes(Encoder):
    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embed(ids)
        for block in self.body["blocks"]:
            hidden = checkpoint(block, hidden, 0.0, use_reentrant=True)
        return hidden


class Branches(Encoder):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids if bool((ids > 3).any()) else ids + 1)


def wrapped() -> nn.Module:
    model = Encoder()
    model._get_fsdp_state = None  # as fully_shard leaves it
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Encoder()


@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        (Recomputes, {}, "torch.export cannot export this Recomputes"),
        (Branches, {}, "torch.export cannot export this Branches"),
        (Encoder, {"blocks": "body"}, r"body is a ModuleDict.*'body\.blocks' \(4\)"),
        (Encoder, {"example": None}, "needs a micro-batch"),
        (Encoder, {"example": IDS[:1]}, r"shapes \[\[2, 6\]\], and.*\[\[1, 6\]\]"),
        (wrapped, {}, r"cut the model first, and wrap"),
        (on_meta, {}, "on the meta device; name the source of its weights"),
        (on_meta, {"weights": 1}, "cut by export needs a real device"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    make: Callable[[], nn.Module], arguments: Any, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        run(cut(make(), **{"blocks": PATH, "example": IDS, **arguments}))


def test_the_method_of_a_cut_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="zbpp"):
        cut(Encoder(), example=IDS)
    assert "Encoder is cut by torch.export into 6 layers" in caplog.text


def test_sequentials_keep_their_names_and_lists_get_names() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert layered_of(nn.Sequential(*layers)).own_name(1, "weight") == "1.weight"
    assert layered_of(layers).own_name(1, "weight") == "layers.1.weight"
    layers[1].weight = layers[0].weight
    assert layered_of(layers).ties == (((0, "weight"), (1, "weight")),)
    built = zbpp.layers_from(lambda indices: [layers[i] for i in indices], n_layers=2)
    assert built.n_layers == 2
    assert layered_of(built) is built


def of_peft(model: nn.Module, *, prompt: bool = False) -> nn.Module:
    """A wrapper as peft's, by the names of its class and its modules."""

    def init(self: Any) -> None:
        nn.Module.__init__(self)
        self.base_model = nn.Module()
        self.base_model.model = model
        config = SimpleNamespace(is_prompt_learning=prompt, peft_type="PROMPT_TUNING")
        self.peft_config = {"default": config}

    methods = {
        "__init__": init,
        "__module__": "peft.peft_model",
        "get_base_model": lambda self: self.base_model.model,
    }
    wrapper: nn.Module = type("PeftModel", (nn.Module,), methods)()
    return wrapper


def test_layers_below_a_wrapper_of_peft_keep_the_wrappers_names() -> None:
    model = of_peft(nn.Sequential(*(nn.Linear(4, 4) for _ in range(2))))
    assert layered_of(model).own_name(1, "weight") == "base_model.model.1.weight"
    with zbpp.Pipeline(
        model, "ZBH1", loss_fn=nn.functional.mse_loss, optimizer=torch.optim.SGD,
        n_stages=2, n_microbatches=2,
    ) as pipeline:  # fmt: skip
        assert set(pipeline.state_dict()["model"]) == set(model.state_dict())
        assert pipeline.step(torch.ones(4, 4), torch.zeros(4, 4)).loss > 0
    for path in (PATH, f"base_model.model.{PATH}"):
        layered = zbpp.cut(of_peft(Encoder()), path, example=IDS)
        name = layered.own_name(1, "graph.model.body.blocks.0.x")
        assert name == "base_model.model.body.blocks.0.x"
    with pytest.raises(RequestError, match="PROMPT_TUNING puts a prompt before"):
        layered_of(of_peft(Encoder(), prompt=True))
