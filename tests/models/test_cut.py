"""Modules cut at named blocks; nothing of transformers is loaded."""

import copy

import pytest
import torch
from flat import flat_pipeline
from torch import nn

from zbpp import RequestError
from zbpp.models import cut, layered_of
from zbpp.models.weights import Weights

D = 8


class Block(nn.Module):
    def __init__(self, returns="tensor"):
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.returns = returns

    def forward(self, hidden, bias, scale=1.0):
        out = hidden + self.linear(torch.tanh(hidden) + bias) * scale
        return (out, None) if self.returns == "tuple" else out


class Encoder(nn.Module):
    """A learned position, a bias that every block reads, and a tied head."""

    def __init__(self, n=4, returns="tensor"):
        super().__init__()
        self.embed = nn.Embedding(16, D)
        self.position = nn.Parameter(torch.randn(6, D))
        self.bias = nn.Linear(D, D)
        self.body = nn.ModuleDict(
            {"blocks": nn.ModuleList(Block(returns) for _ in range(n))}
        )
        self.norm = nn.LayerNorm(D)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids):
        hidden = self.embed(ids) + self.position[: ids.shape[1]]
        bias = self.bias(hidden)
        for block in self.body["blocks"]:
            hidden = block(hidden, bias, scale=self.scale)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.norm(hidden) @ self.embed.weight.t()


IDS = torch.arange(12).reshape(2, 6)
NAMES = {"before": ("embed", "bias"), "after": ("norm", "embed")}


def equal_to_plain(model, layered, ids=IDS):
    plain = copy.deepcopy(model)
    value = ids
    for layer in layered.build(range(layered.n_layers)):
        value = layer(value)
    expected = plain(ids)
    value.square().mean().backward()
    expected.square().mean().backward()
    return torch.equal(value, expected) and all(
        torch.equal(p.grad, q.grad)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("returns", ["tensor", "tuple"])
def test_a_module_of_ones_own_is_cut_to_the_bit(returns):
    model = Encoder(returns=returns)
    layered = cut(model, "body.blocks", **NAMES)
    assert layered.n_layers == 6
    assert equal_to_plain(model, layered)


class InADict(Encoder):
    """Has its blocks in a dictionary, as torchtitan's models have."""

    def __init__(self):
        super().__init__()
        self.body["blocks"] = nn.ModuleDict({str(i): Block() for i in range(4)})

    def forward(self, ids):
        hidden = self.embed(ids) + self.position[: ids.shape[1]]
        bias = self.bias(hidden)
        for block in self.body["blocks"].values():
            hidden = block(hidden, bias)
        return self.norm(hidden) @ self.embed.weight.t()


FOUND = {"before": ("embed",), "after": ("embed",), "example": IDS}


@pytest.mark.parametrize("names", [NAMES, FOUND])
def test_blocks_may_be_in_a_dictionary(names):
    model = InADict()
    layered = cut(model, "body.blocks", **names)
    assert layered.own_name(2, "block.linear.bias") == "body.blocks.1.linear.bias"
    assert equal_to_plain(model, layered)


def test_parts_are_wrapped_after_the_cut_and_never_as_a_whole():
    model = Encoder()
    layered = cut(model, "body.blocks", **NAMES)
    model._get_fsdp_state = None
    with pytest.raises(RequestError, match=r"an? Encoder is wrapped as a whole"):
        layered.build(range(1))
    with pytest.raises(RequestError, match=r"cut the model first, and wrap"):
        cut(model, "body.blocks", **NAMES)


def test_what_is_not_named_is_found_by_a_run_without_compute():
    model = Encoder()
    named = cut(model, "body.blocks", **NAMES)
    found = cut(model, "body.blocks", before=("embed",), after=("embed",), example=IDS)
    for index in (0, 5):
        both = [layered.build(range(index, index + 1))[0] for layered in (named, found)]
        assert [n for n, _ in both[0].named_parameters()] == [
            n for n, _ in both[1].named_parameters()
        ]


def test_what_runs_before_and_after_is_a_tie():
    (tie,) = cut(Encoder(), "body.blocks", **NAMES).ties
    assert tie == ((0, "own.embed.weight"), (5, "own.embed.weight"))


def test_parameters_have_the_models_own_names():
    model = Encoder()
    layered = cut(model, "body.blocks", **NAMES)
    names = {
        layered.own_name(index, name)
        for index, layer in enumerate(layered.build(range(6)))
        for name, _ in layer.named_parameters()
    }
    assert names == {name for name, _ in model.named_parameters()}


def test_buffers_above_the_blocks_are_saved_once_and_loaded():
    def state_and_loss(model, state=None):
        with flat_pipeline(
            cut(model, "body.blocks", **NAMES),
            loss_fn=nn.functional.mse_loss,
            optimizer=None,
            n_stages=2,
            schedule="1F1B",
            n_microbatches=2,
        ) as pipeline:
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


def test_a_bias_with_a_gradient_travels_through_every_block():
    layers = cut(Encoder(), "body.blocks", **NAMES).build(range(6))
    value = layers[0](IDS)
    assert "shared" in value
    (bias,) = (x for x in value["shared"] if x.requires_grad)
    assert any(x is bias for x in layers[1](value)["shared"])


class Noisy(Encoder):
    def forward(self, ids):
        hidden, noise = self.embed(ids), torch.rand(D)
        for block in self.body["blocks"]:
            hidden = block(hidden, noise)
        return self.norm(hidden) @ self.embed.weight.t()


def test_what_is_drawn_for_all_blocks_travels():
    model = Noisy()
    layers = cut(model, "body.blocks", **NAMES).build(range(6))
    layers[0](IDS)  # the first batch is run to see how blocks are called
    value = IDS
    for seed, layer in enumerate(layers):  # of other processes
        torch.manual_seed(seed)
        value = layer(value)
    torch.manual_seed(0)
    assert torch.equal(value, model(IDS))


class HandingBlock(Block):
    """Puts out a bias beside the hidden state; makes it if it gets none."""

    def forward(self, hidden, bias=None):
        bias = torch.tanh(self.linear(hidden)) if bias is None else bias
        return hidden + self.linear(hidden + bias), bias


class HandsOn(Encoder):
    """Each block gets the bias that the one before has put out, as in T5."""

    def __init__(self):
        super().__init__()
        self.body["blocks"] = nn.ModuleList(HandingBlock() for _ in range(4))

    def biases(self, old, new):
        return new

    def forward(self, ids):
        hidden, bias = self.embed(ids), None
        for block in self.body["blocks"]:
            hidden, new = block(hidden, bias)
            bias = self.biases(bias, new)
        return self.norm(hidden) @ self.embed.weight.t()


class HandsFirstOn(HandsOn):
    def biases(self, old, new):
        return new if old is None else old


class HandsNothingOn(HandsOn):
    def biases(self, old, new):
        return None


def test_what_blocks_hand_to_the_next_one_travels():
    model = HandsOn()
    layered = cut(model, "body.blocks", **NAMES)
    value = layered.build(range(2))[1](layered.build(range(1))[0](IDS))
    assert value["more"][0].requires_grad
    del model.bias, model.position
    assert equal_to_plain(
        model, cut(model, "body.blocks", before=("embed",), after=NAMES["after"])
    )


class Twice(Encoder):
    def forward(self, ids):
        hidden = self.embed(ids)
        for block in (*self.body["blocks"], self.body["blocks"][0]):
            hidden = block(hidden, 0.0)
        return self.norm(hidden)


class Backwards(Encoder):
    def forward(self, ids):
        hidden = self.embed(ids)
        for block in reversed(self.body["blocks"]):
            hidden = block(hidden, 0.0)
        return self.norm(hidden)


class Keyword(Encoder):
    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.body["blocks"]:
            hidden = block(bias=0.0, hidden=hidden)
        return self.norm(hidden)


class Between(Encoder):
    def forward(self, ids):
        hidden = self.embed(ids)
        for block in self.body["blocks"]:
            hidden = block(hidden, 0.0) + 1.0
        return self.norm(hidden)


class Skip(Encoder):
    """The head reads what the embedding put out."""

    def forward(self, ids):
        first = hidden = self.embed(ids)
        for block in self.body["blocks"]:
            hidden = block(hidden, 0.0)
        return self.norm(hidden + first)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Backwards, "block 3 is called where block 0 should be"),
        (Keyword, "the first argument of block 0 is missing"),
        (Between, "block 1 is not called with what block 0 puts out"),
        (HandsFirstOn, "block 2 is called with more of what block 0 puts out"),
    ],
)
def test_forwards_that_do_not_fit_are_refused(kind, words):
    layered = cut(kind(), "body.blocks", **NAMES)
    with pytest.raises(RequestError, match=words):
        layered.build(range(1))[0](IDS)


def test_a_tensor_that_no_block_takes_is_refused():
    layers = cut(HandsNothingOn(), "body.blocks", **NAMES).build(range(2))
    with pytest.raises(RequestError, match=r"more than the hidden state \(Tensor\)"):
        layers[1](layers[0](IDS))


def test_blocks_that_run_twice_are_refused():
    layered = cut(Twice(), "body.blocks", **NAMES)
    with pytest.raises(RequestError, match="block 0 is called a second time"):
        value = IDS
        for layer in layered.build(range(6)):
            value = layer(value)


def test_a_head_that_reads_what_ran_before_the_blocks_is_refused():
    names = {"before": ("embed", "bias"), "after": ("norm",)}
    layers = cut(Skip(), "body.blocks", **names).build(range(6))
    value = IDS
    for layer in layers[:-1]:
        value = layer(value)
    with pytest.raises(RequestError, match="reads what ran before"):
        layers[-1](value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"blocks": "body"}, r"body is a ModuleDict.*It has body\.blocks \(4\)"),
        ({"blocks": "body.blocks"}, "not known whether they run before or after"),
        ({"blocks": "body.blocks", "before": ("x",)}, "x: no module beside the path"),
    ],
)
def test_cuts_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(RequestError, match=words):
        cut(Encoder(), **arguments)


def test_a_module_in_the_wrong_place_is_named():
    layered = cut(Encoder(), "body.blocks", before=("embed", "norm"), after=("bias",))
    with pytest.raises(RequestError, match="bias was called where the model's layers"):
        layered.build(range(1))[0](IDS)


def test_sequentials_keep_their_own_names_and_lists_get_some():
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert layered_of(nn.Sequential(*layers)).own_name(1, "weight") == "1.weight"
    assert layered_of(layers).own_name(1, "weight") == "layers.1.weight"
    layers[1].weight = layers[0].weight
    assert layered_of(layers).ties == (((0, "weight"), (1, "weight")),)
    built = layered_of(lambda indices: [layers[i] for i in indices], 2)
    assert built.n_layers == 2
    assert layered_of(built) is built


def test_weights_of_a_seed_are_the_same_for_any_cut():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3)))
    at_once = Weights(model, 3).make("", model)
    alone = Weights(model, 3).make("1", model[1])
    assert torch.equal(at_once[1][0].weight, alone[0].weight)
    assert not torch.equal(
        Weights(model, 4).make("1", model[1])[0].weight, alone[0].weight
    )
    assert not torch.equal(at_once[0].bias, at_once[1][0].bias[:2])


def test_a_model_on_meta_is_made_where_it_is_needed():
    real = Encoder()
    state = real.state_dict()
    with torch.device("meta"):
        model = Encoder()
    layered = cut(model, "body.blocks", **NAMES, weights=state)
    assert all(p.is_meta for p in model.parameters())
    layers = layered.build(range(6))
    value = IDS
    for layer in layers:
        value = layer(value)
    assert torch.equal(value, real(IDS))


def test_weights_that_are_missing_or_do_not_fit_are_named():
    with torch.device("meta"):
        model = Encoder()
    state = Encoder().state_dict()
    with pytest.raises(RequestError, match="on the meta device; say in weights="):
        cut(model, "body.blocks", **NAMES)
    layered = cut(model, "body.blocks", **NAMES, weights=1)
    with pytest.raises(RequestError, match=r"^scale has no initialisation"):
        layered.build(range(1))
    wrong = {**state, "norm.weight": torch.ones(3)}
    layered = cut(model, "body.blocks", **NAMES, weights=wrong)
    with pytest.raises(RequestError, match=r"norm\.weight has the shape \(3,\)"):
        layered.build(range(5, 6))
    del wrong["norm.weight"]
    with pytest.raises(RequestError, match=r"have no tensor norm\.weight"):
        layered.build(range(5, 6))
