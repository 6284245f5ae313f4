"""Mistakes of a user's script: each is refused in one line that names the way out."""

import math
from dataclasses import replace

import pytest
import small
import torch
from torch import nn

import zbpp
from zbpp import diagnostics
from zbpp.core import LayerCosts

mse = nn.functional.mse_loss
X, Y = torch.ones(8, 4), torch.zeros(8, 4)


def layers(n=4):
    return [nn.Linear(4, 4) for _ in range(n)]


def planned(**more):
    return zbpp.plan_model(layers(), "ZBH1", n_stages=2, n_microbatches=4, **more)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def pipeline(model=None, **settings):
    return small.make(layers() if model is None else model, **settings)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(layers())

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class AttentionLike(nn.Module):
    """A name that begins with a vowel, and no list of blocks."""


class CompiledLike(nn.Module):
    """As what torch.compile returns, whose machinery takes seconds to load."""

    def __init__(self):
        super().__init__()
        self._orig_mod = nn.Sequential(*layers())


ADAMW = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.5)
SUM, NONE = nn.MSELoss(reduction="sum"), nn.MSELoss(reduction="none")


def no_parameters(parameters):
    return [torch.optim.Adam([p for p in parameters if p.dim() == 7]), sgd(parameters)]


SETTINGS = [
    # the optimizer
    (
        {"optimizer": ADAMW},
        r"optimizer=lambda parameters: torch.optim.AdamW\(parameters, lr=1e-3\), and "
        "make learning-rate schedulers of pipeline.optimizers",
    ),
    ({"optimizer": "adamw"}, "optimizer is 'adamw'; give a func"),
    ({"optimizer": [torch.optim.SGD]}, "optimizer is a list; give a function"),
    ({"optimizer": lambda ps: None}, "gave a NoneType; let it"),
    ({"optimizer": torch.optim.LBFGS}, "an? LBFGS needs a closure"),
    (
        {"optimizer": no_parameters},
        r"an optimizer of no parameters.*let it return \[\]",
    ),
    ({"optimizer": None, "post_validation": True}, "optimizer is None: there is no st"),
    # the loss
    ({"loss_fn": None}, "the model has no loss; give loss_fn"),
    ({"loss_fn": "mse"}, "loss_fn is 'mse'; give a function"),
    (
        {"loss_fn": SUM, "weigh": "tokens"},
        "reduction='sum', and weigh is 'tokens'.*give reduction='mean'",
    ),
    ({"loss_fn": NONE}, "reduction='none'.*give reduction='mean'"),
    # the schedule
    ({"schedule": "ZBH11"}, "ZBH1"),
    ({"schedule": "plan.json"}, "plan.json"),
    ({"n_microbatches": 2.5}, "n_microbatches is 2.5; give a whole number from 1 on"),
    ({"n_microbatches": 0}, "n_microbatches is 0; give"),
    ({"n_microbatches": None}, "micro-batches|n_microbatches"),
    ({"n_stages": 0}, "n_stages is 0; give a whole number"),
    # policies
    *(
        ({"mesh": mesh}, r"mesh is .*; give zbpp.mesh\(stages=")
        for mesh in (2, "pp", zbpp.DataParallel(mesh="pp"))
    ),
    ({"timeout_s": 0}, "timeout_s is 0; give seconds, above 0"),
    ({"timeout_s": math.nan}, "timeout_s is nan; give seconds"),
    ({"first_timeout_s": 0}, "first_timeout_s is 0; give seconds"),
    ({"clip_grad_norm": 0}, "clip_grad_norm is 0;.*None to clip"),
    ({"autocast": "bf16"}, "autocast is 'bf16'; give a dtype, torch.bfloat16"),
    ({"autocast": torch.int8}, "autocast is torch.int8"),
    (
        {"loss_scale": torch.amp.GradScaler("cpu")},
        "loss_scale is a GradScaler; give a number or a zbpp.runtime.LossScaler",
    ),
    ({"loss_scale": -1}, "choose a positive scale"),
    ({"seed": "0"}, "seed is '0'; give a whole number"),
    ({"first_step": -1}, "first_step is -1; give the number"),
    ({"device": "gpu"}, "device is 'gpu'; give a device that"),
    ({"compile": "all"}, "must be"),
    (
        {"partition_activations": True},
        "partition_activations is on.*give a mesh whose dimension 'tp' is 2 or more",
    ),
    ({"weigh": "words"}, "weigh is 'words'; choose one of"),
]
MODELS = [
    (lambda: planned(split=[1, 2]), r"split \[1, 2\] must"),
    (lambda: planned(split=[5, -1]), r"\[5, -1\]"),
    (lambda: planned(split="equal"), "split 'equal' is not known; choose"),
    (
        lambda: planned(recompute=(9,)),
        "layer 9 is to be recomputed; the layers are 0 to 3",
    ),
    (
        lambda: pipeline(schedule=replace(planned().schedule, recompute=((0, 7), 1))),
        "layer 7 of a chunk of 2 layers",
    ),
    (lambda: planned(split="balanced"), "give costs of layers"),
    (
        lambda: planned(costs=LayerCosts(n_layers=8)),
        "of 8 layers, but the model has 4",
    ),
    (lambda: planned(memory_limit="16GiB"), "or example= of zbpp"),
    (
        lambda: pipeline(mesh=zbpp.DataParallel(mesh=None, shard="all")),
        "shard is 'all'",
    ),
    (
        Tower,
        r"a Tower cannot be cut into layers; cut it at its blocks, zbpp.cut\(model, "
        "'blocks', example=batch",
    ),
    (
        AttentionLike,
        "^an AttentionLike cannot be cut into layers; give an nn.Sequential",
    ),
    (CompiledLike, 'give the model that it was called with, and compile="blocks"'),
    (
        lambda: [*layers(), torch.relu],
        r"layer 4 is a builtin_function_or_method \(relu\), no nn.Module.*nn.ReLU",
    ),
    (lambda: lambda indices: layers(len(indices)), "a builder needs n_layers"),
    (
        lambda: zbpp.layers_from(lambda indices: layers(1), n_layers=4),
        "the builder made 1 layers for range",
    ),
    (
        lambda: zbpp.layers_from(layers(), n_layers=4),
        "build is a list; give a function",
    ),
    (lambda: layers(1), "1 layers cannot fill 2 chunks"),
    (
        lambda: zbpp.cut(Tower(), "layers", example=torch.zeros(1, 4)),
        r"layers is nothing in a Tower.*lists 'blocks' \(4\)",
    ),
    (lambda: zbpp.cut(Tower()), "a Tower is cut by export, which needs a micro-batch"),
    (
        lambda: [layer.to("meta") for layer in layers()],
        "layers.0.weight is on the meta device.*give a builder",
    ),
]
LOSSES = [
    (lambda y, t: (mse(y, t), [y]), "the metrics a list; they must be a dict"),
    (
        lambda y, t: (mse(y, t), {"a": y}),
        r"the metrics 'a' as a Tensor of shape \(2, 4\)",
    ),
    (lambda y, t: (mse(y, t), {"a": "x"}), "the metrics 'a' as a str; they"),
    (lambda y, t: (mse(y, t), {}, {}), "must return a scalar tensor"),
    (lambda y, t: (y - t).square(), "must return a scalar tensor"),
    (lambda y, t: 1.0, "must return a scalar tensor"),
    (lambda y, t: mse(y.detach(), t), "the loss has no graph.*without detach"),
    (
        lambda y, t: y.sum() * 1j,
        "returned torch.complex64 of .*scalar tensor of floating point",
    ),
    (
        lambda y, t: y.argmax(),
        "returned torch.int64 of shape .*; it must return a scalar tensor of",
    ),
]
BATCHES = [
    (X, None, "needs the targets of the batch"),
    (None, Y, "needs the inputs of the batch"),
    (X[:3], Y[:3], "inputs has 3 samples for 4 micro-batches.*drop_last=True"),
    ([*X[:4, None]], Y[:3], "targets has 3 samples for 4 micro-batches"),
    ([*X], [*Y], "a list of 8; give one entry"),
    (1.0, Y, "inputs is a float without tensors"),
    ({"x": 1}, Y, "without tensors of samples"),
    ((torch.tensor(1),), Y, "without tensors of samples"),
    ([{X}] * 4, Y, "input of micro-batch 0 is a set"),
    ([[X, 1j]] * 4, Y, "input of micro-batch 0 is a complex"),
    ({"a": X, "b": X[:2]}, Y, "inputs is a dict of tensors of"),
]


def foreign_scheduler():
    return torch.optim.lr_scheduler.ConstantLR(sgd([nn.Parameter(torch.ones(1))]))


CALLS = [
    (lambda one: one.save("x", keep=0), "keep is 0; it must"),
    (
        lambda one: one.attach(foreign_scheduler()),
        "ConstantLR is not of an optimizer of this pipeline.*make one for each of "
        "pipeline.optimizers",
    ),
    (diagnostics.timeline, "call pipeline.step"),
]


def refused(words, call, *arguments, **more):
    with pytest.raises(zbpp.RequestError, match=words) as caught:
        call(*arguments, **more)
    assert "\n" not in str(caught.value)


def words_only(value: object) -> str:
    """Texts name a row: they are the same in every worker."""
    return value[:40] if isinstance(value, str) else "row"


@pytest.mark.parametrize(("settings", "words"), SETTINGS, ids=words_only)
def test_wrong_settings_are_refused(settings, words):
    refused(words, pipeline, **settings)


@pytest.mark.parametrize(("model", "words"), MODELS, ids=words_only)
def test_models_that_cannot_be_cut_are_refused(model, words):
    refused(words, lambda: pipeline(model()))


@pytest.mark.parametrize(("loss_fn", "words"), LOSSES, ids=words_only)
def test_losses_without_a_gradient_are_refused(loss_fn, words):
    refused(words, pipeline(loss_fn=loss_fn).step, X, Y)


@pytest.mark.parametrize(("inputs", "targets", "words"), BATCHES)
def test_wrong_batches_are_refused(inputs, targets, words):
    refused(words, pipeline().step, inputs, targets)


@pytest.mark.parametrize(("call", "words"), CALLS, ids=words_only)
def test_wrong_calls_are_refused(call, words):
    refused(words, call, pipeline())


def test_a_closed_pipeline_does_not_step():
    closed = pipeline()
    closed.close()
    with pytest.raises(RuntimeError, match=r"close|ended"):
        closed.step(X, Y)


def test_likely_mistakes_are_warned_of():
    with pytest.warns(UserWarning, match="this process is alone and n_stages is left"):
        assert pipeline(n_stages=None).schedule.n_stages == 1
    with pytest.warns(UserWarning, match="float16 without a loss_scale"):
        pipeline(autocast=torch.float16)
    pipeline(autocast=torch.float16, loss_scale=1024.0)
    pipeline(autocast=torch.bfloat16)
    model = nn.Sequential(*layers())
    model._compiled_call_impl = model.forward  # what model.compile() does
    with pytest.warns(UserWarning, match='give compile="blocks"'):
        pipeline(model)


# What is no mistake.


@pytest.mark.parametrize("tied", [False, True])
def test_an_optimizer_by_names_gets_the_names_of_the_model(tied):
    tower, names = Tower(), []

    def build(named_parameters):
        names.extend(name for name, _ in named_parameters)
        return sgd([p for _, p in named_parameters])

    if tied:  # it has the name of its first layer
        tower.blocks[3].weight = tower.stem.weight
    pipeline(zbpp.cut(tower, "blocks", example=torch.zeros(2, 4)), optimizer=build)
    assert {*names} == {name for name, _ in tower.named_parameters()}
    assert names.count("stem.weight") == 1
