"""Mistakes of a user's script: each is refused in one line that names the mend."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from torch import Tensor, nn

import zbpp
from zbpp import Pipeline, diagnostics

mse = nn.functional.mse_loss
X, Y = torch.ones(8, 4), torch.zeros(8, 4)


def layers(n: int = 4) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(n)]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def made(model: Any = None, **more: Any) -> Pipeline:
    settings: dict[str, Any] = {
        "loss_fn": mse,
        "optimizer": sgd,
        "n_stages": 2,
        "n_microbatches": 4,
    }
    return flat_pipeline(layers() if model is None else model, **settings | more)


def step(inputs: Any = X, targets: Any = Y, **more: Any) -> Any:
    return made(**more).step(inputs, targets)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(layers())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class AttentionLike(nn.Module):
    """A name that begins with a vowel, and no list of blocks."""


class CompiledLike(nn.Module):
    """As what torch.compile returns, whose machinery takes seconds to load."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.Sequential(*layers())


class Expanded(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.bias = nn.Parameter(torch.zeros(1).expand(4))


def instance(**more: Any) -> Any:
    return made(optimizer=torch.optim.AdamW(nn.Linear(2, 2).parameters(), **more))


def on_meta() -> Any:
    with torch.device("meta"):
        return made(layers())


def after_close() -> Any:
    pipeline = made()
    pipeline.close()
    return pipeline.step(X, Y)


def adam_of_matrices(parameters: list[nn.Parameter]) -> list[Any]:
    return [torch.optim.Adam([p for p in parameters if p.dim() == 7]), sgd(parameters)]


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    # the optimizer
    "an instance": (
        partial(instance, lr=0.5),
        r"optimizer=lambda parameters: torch.optim.AdamW\(parameters, lr=0.5\), and "
        "make learning-rate schedulers of pipeline.optimizers",
    ),
    "a name": (lambda: made(optimizer="adamw"), "optimizer is 'adamw'; give a func"),
    "a module": (lambda: made(optimizer=nn.Linear(2, 2)), "optimizer is a Linear"),
    "a list of them": (
        lambda: made(optimizer=[torch.optim.SGD]),
        "optimizer is a list; give a function",
    ),
    "no return": (lambda: made(optimizer=lambda ps: None), "gave a NoneType; let it"),
    "a class without call": (
        lambda: made(optimizer=lambda ps: torch.optim.SGD),
        "gave a type; let it return",
    ),
    "a closure": (
        lambda: made(optimizer=torch.optim.LBFGS),
        "an LBFGS needs a closure|a LBFGS needs a closure",
    ),
    "expanded": (
        lambda: made([Expanded(), *layers(3)]),
        r"layers.0.bias of shape \[4\] is expanded.*make it whole",
    ),
    "one without parameters": (
        lambda: made(optimizer=adam_of_matrices),
        "an optimizer of no parameters.*leave it out",
    ),
    "rounds without steps": (
        lambda: made(optimizer=None, post_validation=True),
        "optimizer is None: there is no step",
    ),
    # the loss
    "no loss": (lambda: made(loss_fn=None), "no loss of its own; give loss_fn"),
    "a loss's name": (lambda: made(loss_fn="mse"), "loss_fn is 'mse'; give a function"),
    "a loss's class": (
        lambda: made(loss_fn=nn.MSELoss),
        "loss_fn is MSELoss; give a function",
    ),
    "a sum in tokens": (
        lambda: made(loss_fn=nn.MSELoss(reduction="sum"), weigh="tokens"),
        "reduction='sum', and weigh is 'tokens'.*give reduction='mean'",
    ),
    "no reduction": (
        lambda: made(loss_fn=nn.MSELoss(reduction="none")),
        "reduction='none'.*give reduction='mean'",
    ),
    "a loss per sample": (
        lambda: step(loss_fn=lambda y, t: (y - t).square()),
        "loss_fn must return a scalar",
    ),
    "a float": (lambda: step(loss_fn=lambda y, t: 1.0), "must return a scalar tensor"),
    "a loss without a graph": (
        lambda: step(loss_fn=lambda y, t: mse(y.detach(), t)),
        "the loss has no graph.*without detach",
    ),
    "a complex loss": (
        lambda: step(loss_fn=lambda y, t: y.sum() * 1j),
        "a scalar of torch.complex64; it must be a real number",
    ),
    "a whole number": (
        lambda: step(loss_fn=lambda y, t: y.argmax()),
        "a scalar of torch.int64; it must be a real number",
    ),
    # the model
    "a plain module": (
        lambda: made(Tower()),
        r"a Tower cannot be cut into layers; cut it at its blocks, zbpp.cut\(model, "
        "'blocks', example=batch",
    ),
    "a module that is one layer": (
        lambda: made(AttentionLike()),
        "^an AttentionLike cannot be cut into layers; give an nn.Sequential",
    ),
    "a compiled one": (
        lambda: made(CompiledLike()),
        'give the model that it was called with, and compile="blocks"',
    ),
    "a function as a layer": (
        lambda: made([*layers(), torch.relu]),
        r"layer 4 is a builtin_function_or_method \(relu\), no nn.Module.*nn.ReLU",
    ),
    "a class as a layer": (
        lambda: made([*layers(), nn.ReLU]),
        r"layer 4 is a type \(ReLU\), no nn.Module",
    ),
    "a builder of functions": (
        lambda: made(lambda indices: [torch.relu for _ in indices], n_layers=4),
        "layer 0 is a builtin_function_or_method",
    ),
    "meta layers": (on_meta, "layers.0.weight is on the meta device.*give a builder"),
    "a builder alone": (
        lambda: made(lambda indices: layers(len(indices))),
        "a builder needs n_layers",
    ),
    "a builder of too few": (
        lambda: made(lambda indices: layers(1), n_layers=4),
        "the builder made 1 layers for range",
    ),
    "a wrong n_layers": (
        lambda: made(n_layers=5),
        "n_layers is 5, but the model has 4",
    ),
    "no layers": (lambda: made([]), "0 layers cannot fill 2 chunks"),
    "too few layers": (lambda: made(layers(1)), "1 layers cannot fill 2 chunks"),
    "a wrong cut": (
        lambda: zbpp.cut(Tower(), "layers"),
        "layers is nothing in a Tower; name the ModuleList",
    ),
    "a cut without a path": (
        lambda: zbpp.cut(Tower()),
        "a Tower has no plan; name its blocks",
    ),
    "loss and model swapped": (
        lambda: made(mse, loss_fn=layers()),
        r"loss_fn is \[Linear.*give a function of \(outputs, targets\)",
    ),
    # the schedule
    "a mode's typo": (lambda: made(schedule="ZBH11"), "ZBH1"),
    "no mode": (lambda: made(schedule=None), "schedule is a NoneType; give the name"),
    "a file that is not there": (lambda: made(schedule="plan.json"), "plan.json"),
    "a half micro-batch": (
        lambda: made(n_microbatches=2.5),
        "n_microbatches is 2.5; give a whole number from 1 on",
    ),
    "a text": (lambda: made(n_microbatches="4"), "n_microbatches is '4'; give a whole"),
    "a truth": (lambda: made(n_microbatches=True), "n_microbatches is True; give a"),
    "no micro-batches": (lambda: made(n_microbatches=0), "n_microbatches is 0; give"),
    "left out": (lambda: made(n_microbatches=None), "micro-batches|n_microbatches"),
    "no stages": (lambda: made(n_stages=0), "n_stages is 0; give a whole number"),
    "half a stage": (lambda: made(n_stages=1.5), "n_stages is 1.5; give a whole"),
    "a split of another model": (lambda: made(split=[1, 2]), r"split \[1, 2\] must"),
    "a split's name": (
        lambda: made(split="equal"),
        "split 'equal' is not known; choose",
    ),
    "a split without costs": (lambda: made(split="balanced"), "give layer_costs="),
    "bytes without costs": (lambda: made(memory_limit="16GiB"), "or example= of zbpp"),
    "a unit's typo": (lambda: made(memory_limit="16 gigs"), "16 gigs"),
    # numbers
    "no time": (lambda: made(timeout_s=0), "timeout_s is 0; give seconds, above 0"),
    "less": (lambda: made(timeout_s=-1), "timeout_s is -1; give seconds, above 0"),
    "no number": (lambda: made(timeout_s=math.nan), "timeout_s is nan; give seconds"),
    "for ever": (lambda: made(timeout_s=1e300), r"timeout_s is 1e\+300; give seconds"),
    "a first time": (
        lambda: made(first_timeout_s=0),
        "first_timeout_s is 0; give seconds",
    ),
    "a text for seconds": (lambda: made(timeout_s="60"), "timeout_s is '60'; give"),
    "clip below": (lambda: made(clip_grad_norm=-1), "clip_grad_norm is -1; give"),
    "clip all": (lambda: made(clip_grad_norm=0), "clip_grad_norm is 0;.*None to clip"),
    "clip nan": (lambda: made(clip_grad_norm=math.nan), "clip_grad_norm is nan; give"),
    "clip truth": (lambda: made(clip_grad_norm=True), "clip_grad_norm is True; give"),
    "a dtype's name": (
        lambda: made(autocast="bf16"),
        "autocast is 'bf16'; give a dtype, torch.bfloat16",
    ),
    "autocast on": (lambda: made(autocast=True), "autocast is True; give a dtype"),
    "autocast to integers": (
        lambda: made(autocast=torch.int8),
        "autocast is torch.int8",
    ),
    "torch's scaler": (
        lambda: made(loss_scale=torch.amp.GradScaler("cpu")),
        "loss_scale is a GradScaler; give a number or a zbpp.runtime.LossScaler",
    ),
    "a negative scale": (lambda: made(loss_scale=-1), "choose a positive scale"),
    "a seed's text": (lambda: made(seed="0"), "seed is '0'; give a whole number"),
    "a step before": (lambda: made(first_step=-1), "first_step is -1; give the number"),
    "a device's typo": (lambda: made(device="gpu"), "device is 'gpu'; give one that"),
    "compile everything": (lambda: made(compile="all"), "must be"),
    "compile chunks": (lambda: made(compile="chunks"), 'is no more: compile="blocks"'),
    "a weigh's typo": (lambda: made(weigh="words"), "weigh is 'words'; choose one of"),
    "shards without replicas": (lambda: made(shard="all"), "shard is 'all'"),
    # the batch
    "no targets": (lambda: step(targets=None), "needs the targets of the batch"),
    "no inputs": (lambda: step(inputs=None), "needs the inputs of the batch"),
    "no samples": (lambda: step(X[:0], Y[:0]), "no samples, and each.*drop_last=True"),
    "a list beside few samples": (
        lambda: step([*X[:4, None]], Y[:3]),
        "samples for 4 micro-batches and targets for 3",
    ),
    "other samples": (lambda: step(X, Y[:4]), "inputs has 8 samples and targets 4"),
    "a list of samples": (
        lambda: step(list(X), list(Y)),
        "a list of 8; give one entry",
    ),
    "a number": (lambda: step(1.0, Y), "inputs is a float without tensors"),
    "a text as batch": (lambda: step("batch", Y), "inputs is a str without tensors"),
    "a dict of other lengths": (
        lambda: step({"a": X, "b": X[:2]}, Y),
        "inputs is a dict of tensors of",
    ),
    # calls
    "a step after close": (after_close, "close|ended"),
    "no checkpoints to keep": (lambda: made().save("x", keep=0), "keep is 0; it must"),
    "another's scheduler": (
        lambda: made().attach(
            torch.optim.lr_scheduler.ConstantLR(sgd([nn.Parameter(torch.ones(1))]))
        ),
        "ConstantLR is not of an optimizer of this pipeline.*make one for each of "
        "pipeline.optimizers",
    ),
    "times before a step": (lambda: diagnostics.timeline(made()), "call pipeline.step"),
    "a tie to nowhere": (
        lambda: made(ties=[((0, "weight"), (9, "weight"))]),
        "ties?|9",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_in_one_line_that_names_the_mend(name: str) -> None:
    make_it, words = MISTAKES[name]
    with pytest.raises((zbpp.RequestError, RuntimeError), match=words) as caught:
        make_it()
    assert "\n" not in str(caught.value)
    if isinstance(caught.value, RuntimeError):
        assert name == "a step after close"


def test_fp16_without_a_loss_scale_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="float16 without a loss_scale"):
        made(autocast=torch.float16)
    made(autocast=torch.float16, loss_scale=1024.0)
    made(autocast=torch.bfloat16)


def test_a_whole_model_that_is_compiled_is_warned_of() -> None:
    model = nn.Sequential(*layers())
    model._compiled_call_impl = model.forward  # what model.compile() does
    with pytest.warns(UserWarning, match='give compile="blocks"'):
        made(model)


def test_what_is_no_mistake_is_taken() -> None:
    def filtered(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in parameters if p.requires_grad])

    model = layers()
    for layer in model[:2]:  # the front is frozen: its stage has nothing to step
        layer.requires_grad_(False)
    before = model[3].weight.detach().clone()  # type: ignore[operator]
    pipeline = made(model, optimizer=filtered, clip_grad_norm=math.inf)
    pipeline.step(X, Y)
    pipeline.synchronize()
    assert len(pipeline.optimizers) == 1
    assert not torch.equal(before, model[3].weight)  # type: ignore[arg-type]
    ragged = made().step(torch.ones(6, 4), torch.zeros(6, 4))  # 4 cannot share 6 evenly
    assert math.isfinite(ragged.loss)


def test_a_function_of_named_parameters_gets_the_models_own_names() -> None:
    names: list[str] = []

    def by_name(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
        names.extend(name for name, _ in named_parameters)
        decayed = [p for name, p in named_parameters if not name.endswith("bias")]
        others = [p for name, p in named_parameters if name.endswith("bias")]
        return torch.optim.AdamW(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        )

    tower = Tower()
    wanted = [name for name, _ in tower.named_parameters()]
    made(zbpp.cut(tower, "blocks", before=["stem"]), optimizer=by_name)
    assert names == wanted

    names.clear()
    made(lambda indices: layers(len(indices)), n_layers=4, optimizer=by_name)
    assert names[:2] == ["layers.0.weight", "layers.0.bias"]

    names.clear()
    with torch.device("meta"):
        meta = Tower()
    made(zbpp.cut(meta, "blocks", before=["stem"], weights=0), optimizer=by_name)
    assert names == wanted


def test_a_tied_parameter_has_the_name_of_its_first_holder_on_every_stage() -> None:
    names: list[str] = []

    def by_name(named_parameters: list[tuple[str, nn.Parameter]]) -> Any:
        names.extend(name for name, _ in named_parameters)
        return sgd([p for _, p in named_parameters])

    tied = nn.Sequential(*layers())
    tied[3].weight = tied[0].weight
    made(tied, optimizer=by_name)
    assert names.count("0.weight") == 2
    assert "3.weight" not in names
