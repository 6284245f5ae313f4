"""Modules cut at named blocks; nothing of transformers is loaded."""

import copy
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


class HandingBlock(Block):
    """Puts out a bias beside the hidden state; makes it if it gets none."""

    def forward(self, hidden: Tensor, bias: Any = None, scale: Any = 1.0) -> Any:
        bias = torch.tanh(self.linear(hidden)) if bias is None else bias
        return hidden + self.linear(hidden + bias), bias


class HandsOn(Encoder):
    """Each block gets the bias that the one before has put out, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        blocks = nn.ModuleList(HandingBlock() for _ in range(4))
        self.body = nn.ModuleDict({"blocks": blocks})
        del self.bias, self.position

    def biases(self, old: Any, new: Any) -> Any:
        return new

    def forward(self, ids: Tensor) -> Tensor:
        hidden, bias = self.embed(ids), None
        for block in self.body["blocks"]:
            hidden, new = block(hidden, bias)
            bias = self.biases(bias, new)
        logits: Tensor = self.norm(hidden) @ self.embed.weight.t()
        return logits


IDS = torch.arange(12).reshape(2, 6)
PATH = "body.blocks"
NAMES = {"before": ("embed", "bias"), "after": ("norm", "embed")}
FOUND = {"before": ("embed",), "after": ("embed",), "example": IDS}
HANDED = {"before": ("embed",), "after": ("norm", "embed")}


def run(layered: Layered, value: Any = IDS) -> Any:
    """Hand a value through all layers."""
    for layer in layered.build(range(layered.n_layers)):
        value = layer(value)
    return value


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (Encoder, NAMES),
        (Encoder, FOUND),
        (lambda: Encoder("tuple"), NAMES),
        (InADict, NAMES),
        (InADict, FOUND),
        (HandsOn, HANDED),
    ],
)
def test_a_module_is_cut_to_the_bit_under_its_own_names(
    make: Callable[[], nn.Module], names: Any
) -> None:
    model = make()
    plain = copy.deepcopy(model)
    layered = cut(model, PATH, **names)
    assert layered.n_layers == 6
    value, expected = run(layered), plain(IDS)
    assert torch.equal(value, expected)
    value.square().mean().backward()
    expected.square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    found = {
        layered.own_name(index, name)
        for index, layer in enumerate(layered.build(range(6)))
        for name, _ in layer.named_parameters()
    }
    assert found == {name for name, _ in model.named_parameters()}
    (tie,) = layered.ties  # what runs before and after the blocks
    assert [layered.own_name(*end) for end in tie] == ["embed.weight"] * 2
    assert [index for index, _ in tie] == [0, 5]


def test_what_every_block_reads_travels_with_its_gradient() -> None:
    layers = cut(Encoder(), PATH, **NAMES).build(range(6))
    value = layers[0](IDS)
    (bias,) = (x for x in value["shared"] if x.requires_grad)
    assert any(x is bias for x in layers[1](value)["shared"])
    of_block = cut(HandsOn(), PATH, **HANDED).build(range(2))
    assert of_block[1](of_block[0](IDS))["more"][0].requires_grad


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


@pytest.mark.parametrize("before", [("embed",), ("embed", "drop")])
def test_a_dropout_before_the_blocks_works_in_training(before: Any) -> None:
    model = Dropping()
    torch.manual_seed(1)
    expected = model(IDS)
    layered = cut(model, PATH, before=before, after=("norm", "embed"))
    torch.manual_seed(1)
    assert torch.equal(run(layered), expected)


def test_buffers_above_the_blocks_are_saved_once_and_loaded() -> None:
    def state_and_loss(model: nn.Module, state: Any = None) -> tuple[Any, float]:
        with zbpp.Pipeline(
            cut(model, PATH, **NAMES), "1F1B", optimizer=None, n_stages=2,
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


class Looping(Encoder):
    """Runs its blocks as a function says, which is handed the hidden state."""

    def loop(self, blocks: Any, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.loop(self.body["blocks"], self.embed(ids)))
        return hidden


class Twice(Looping):
    def loop(self, blocks: Any, hidden: Tensor) -> Tensor:
        for block in (*blocks, blocks[0]):
            hidden = block(hidden, 0.0)
        return hidden


class Between(Looping):
    def loop(self, blocks: Any, hidden: Tensor) -> Tensor:
        for block in blocks:
            hidden = block(hidden, 0.0) + 1.0
        return hidden


class Skip(Looping):
    """The head reads what the embedding put out."""

    def loop(self, blocks: Any, hidden: Tensor) -> Tensor:
        first = hidden
        for block in blocks:
            hidden = block(hidden, 0.0)
        return hidden + first


class Recomputes(Looping):
    def loop(self, blocks: Any, hidden: Tensor) -> Tensor:
        for block in blocks:
            hidden = checkpoint(block, hidden, 0.0, use_reentrant=True)
        return hidden


class HandsNothingOn(HandsOn):
    def biases(self, old: Any, new: Any) -> Any:
        return None


def wrapped_as_a_whole() -> nn.Module:
    model = Encoder()
    model._get_fsdp_state = None  # as fully_shard leaves it
    return model


def on_meta(make: Callable[[], nn.Module] = Encoder) -> nn.Module:
    with torch.device("meta"):
        return make()


STATE = Encoder().state_dict()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize(
    ("make", "arguments", "words"),
    [
        (Between, NAMES, "block 1 is not called with what block 0 puts out"),
        (Twice, NAMES, "block 0 is called a second time"),
        (Recomputes, NAMES, "needs use_reentrant=False"),
        (HandsNothingOn, HANDED, r"more than the hidden state \(Tensor\)"),
        (
            Skip,
            {"before": ("embed", "bias"), "after": ("norm",)},
            "reads what ran before",
        ),
        (
            Encoder,
            {"before": ("embed", "norm"), "after": ("bias",)},
            "bias was called where the model's layers",
        ),
        (Encoder, {"blocks": "body"}, r"body is a ModuleDict.*body\.blocks \(4\)"),
        (Encoder, {}, "not known whether they run before or after"),
        (Encoder, {"before": ("x",)}, "x: no module beside the path"),
        (wrapped_as_a_whole, NAMES, r"cut the model first, and wrap"),
        (on_meta, NAMES, "on the meta device; say in weights="),
        (on_meta, {**NAMES, "weights": 1}, "^scale has no initialisation"),
        (
            on_meta,
            {**NAMES, "weights": {**STATE, "norm.weight": torch.ones(3)}},
            r"norm\.weight has the shape \(3,\)",
        ),
        (
            on_meta,
            {
                **NAMES,
                "weights": {k: v for k, v in STATE.items() if k != "norm.weight"},
            },
            r"have no tensor norm\.weight",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    make: Callable[[], nn.Module], arguments: Any, words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        run(cut(make(), **{"blocks": PATH, **arguments}))


def test_parts_are_wrapped_after_the_cut_and_never_as_a_whole() -> None:
    model = Encoder()
    layered = cut(model, PATH, **NAMES)
    model._get_fsdp_state = None
    with pytest.raises(RequestError, match=r"an? Encoder is wrapped as a whole"):
        layered.build(range(1))


def test_sequentials_keep_their_own_names_and_lists_get_some() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert layered_of(nn.Sequential(*layers)).own_name(1, "weight") == "1.weight"
    assert layered_of(layers).own_name(1, "weight") == "layers.1.weight"
    layers[1].weight = layers[0].weight
    assert layered_of(layers).ties == (((0, "weight"), (1, "weight")),)
    built = layered_of(lambda indices: [layers[i] for i in indices], 2)
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
        name = zbpp.cut(of_peft(Encoder()), path, **NAMES).own_name(1, "block.x")
        assert name == "base_model.model.body.blocks.0.x"
    with pytest.raises(RequestError, match="PROMPT_TUNING puts a prompt before"):
        layered_of(of_peft(Encoder(), prompt=True))


def test_a_model_on_meta_is_made_where_it_is_needed() -> None:
    real = Encoder()
    model = on_meta()
    layered = cut(model, PATH, **NAMES, weights=real.state_dict())
    assert torch.equal(run(layered), real(IDS))
    assert all(p.is_meta for p in model.parameters())
