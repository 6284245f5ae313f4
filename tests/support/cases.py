"""One training of any kind, and its plain loop: `Case` -> `Trace`.

    run(case)                   by a pipeline, in this process or on ranks of the pool
    on_ranks(pool, case, 2)     the same in two processes, their parts joined
    plain(case)                 by a loop over micro-batches in plain torch
    reference(case)             that, or one stage where no plain loop has the bits
    difference(found, other)    the first place in which two traces differ, or None

The settings that decide the numbers (`NUMBERS`) are read by both; all others must
change no bit.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from case_models import MODELS, N_LAYERS, Model
from torch import Tensor, nn
from torch.utils import _pytree

import zbpp
from zbpp import Schedule
from zbpp.runtime.testing import small_buckets

__all__ = [
    "Case",
    "Trace",
    "difference",
    "make",
    "merged",
    "on_ranks",
    "plain",
    "plan_in_parts",
    "reference",
    "run",
    "unknown",
]

EVALUATED = 99
"""The step whose batch is evaluated and predicted at the end."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Settings of a training; the defaults are the plainest ones.

    Args:
        mode: of the schedule, or a `Schedule`.
        model: a name in `case_models.MODELS`.
        given: ``"layers"``, a list; or ``"builder"``, a function of layer indices.
        n_stages: in one process; several take as many as there are.
        n_microbatches: in a step.
        samples: in a step; several: of the steps in turn.
        steps: to take.
        recompute: ``"all"``, ``"none"`` or numbers of layers.
        split: layers of each chunk.
        parts: plan with costs of layers that communicate, so that passes have parts.
        overlap: stop at overlap points.
        post_validation: as in `zbpp.StepPolicy`.
        snapshots: the optimizer's class is one that zbpp does not know.
        buckets: the optimizer steps small parts of its parameters.
        calls: of ``forward_backward`` for each step; 0: ``step`` is called.
        optimizer: a name in `OPTIMIZERS`, or None.
        clip: largest gradient norm.
        loss_scale: constant.
        weigh: as in `zbpp.Numerics`.
        autocast: to bfloat16.
        seed: of the numbers that layers draw.
        exact_sums: as in `zbpp.Numerics`.
        compile: as in `zbpp.Execution`.
        switch: a mode of the same placement, which takes over after the first step.
        resume: mode and number of stages that go on from a checkpoint of half way.
        device: of all tensors.
    """

    mode: str | Schedule = "ZBH1"
    model: str = "lm"
    given: str = "layers"
    n_stages: int = 2
    n_microbatches: int = 4
    samples: int | tuple[int, ...] = 8
    steps: int = 3
    recompute: str | tuple[int, ...] | None = None
    split: tuple[int, ...] | None = None
    parts: bool = False
    overlap: bool = True
    post_validation: bool | None = None
    snapshots: bool = False
    buckets: bool = False
    calls: int = 0
    optimizer: str | None = "adamw"
    clip: float | None = None
    loss_scale: float | None = None
    weigh: str | None = None
    autocast: bool = False
    seed: int | None = 3
    exact_sums: bool = True
    compile: bool | str = False
    switch: str | None = None
    resume: tuple[str, int] | None = None
    device: str = "cpu"

    @property
    def of(self) -> Model:
        """The model."""
        return MODELS[self.model]

    @property
    def is_exact(self) -> bool:
        """Each bit is that of the reference."""
        return self.exact_sums and self.of.oracle != "close"

    def batch(self, step: int) -> tuple[Any, Tensor]:
        """Inputs and targets of a step."""
        samples = (self.samples,) if isinstance(self.samples, int) else self.samples
        return self.of.batch(step, samples[step % len(samples)])


NUMBERS = (
    "model",
    "n_microbatches",
    "samples",
    "steps",
    "calls",
    "optimizer",
    "clip",
    "loss_scale",
    "weigh",
    "autocast",
    "seed",
    "compile",
)
"""Settings that decide the numbers; all modes must agree for each of them."""


_sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True)
_adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def _several(parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """One for matrices, one for the rest."""
    parts = ([p for p in parameters if (p.dim() > 1) == x] for x in (True, False))
    make: Sequence[Any] = (_sgd, _adamw)
    return [one(part) for one, part in zip(make, parts, strict=True) if part]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": _adamw,
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "sgd": _sgd,
    "plain sgd": partial(torch.optim.SGD, lr=0.1),
    "several": _several,
}


@dataclass
class Trace:
    """Outcome of a training; of one rank, or of all."""

    losses: list[float] = field(default_factory=list)
    each: list[tuple[float, ...]] = field(default_factory=list)
    """Losses of the micro-batches of each step."""
    norms: list[float | None] = field(default_factory=list)
    evaluation: float | None = None
    prediction: list[Tensor] | None = None
    """Tensors of the outputs, where the last chunk is."""
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    """State of the optimizers, as ``layers.0.weight exp_avg``."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the last step, if there is no optimizer."""
    rollbacks: int = 0
    """Not compared: it depends on how steps are validated."""


# ---- By a pipeline.


def run(case: Case) -> Trace:
    """Train by a pipeline, in this process or as one rank of a process group."""
    trace, half = Trace(), case.steps // 2 if case.resume else case.steps
    with small_buckets() if case.buckets else nullcontext(), _folder() as folder:
        with make(case) as pipeline:
            _train(case, pipeline, trace, range(half))
            if case.resume is None:
                return _finish(case, pipeline, trace)
            pipeline.save(folder, wait=True)
        with make(case, *case.resume) as pipeline:
            pipeline.load(folder)
            _train(case, pipeline, trace, range(half, case.steps))
            return _finish(case, pipeline, trace)


def on_ranks(pool: Any, case: Case, n: int) -> Trace:
    """Train in n processes, and join their traces."""
    return merged(pool.run(_run, n, case))


def _run(case: Case) -> Trace:
    from cases import run  # by its own name, so that the answer can be pickled

    return run(case)


def merged(traces: Sequence[Trace]) -> Trace:
    """The trace of all ranks.

    Raises:
        AssertionError: two ranks contradict one another.
    """
    found = replace(traces[0])
    for other in traces[1:]:
        for name in ("losses", "each", "norms", "evaluation"):
            here, there = getattr(found, name), getattr(other, name)
            assert here == there, f"ranks differ in their {name}: {here} and {there}"
        for name in ("parameters", "buffers", "moments", "gradients"):
            here, there = getattr(found, name), getattr(other, name)
            for key in here.keys() & there.keys():
                assert torch.equal(here[key], there[key]), f"ranks differ in {key}"
            setattr(found, name, here | there)
        found.prediction = found.prediction or other.prediction
    return found


@contextmanager
def _folder() -> Iterator[str]:
    """A folder that all ranks see, removed at the end."""
    is_alone = not dist.is_initialized()
    makes = is_alone or dist.get_rank() == 0
    with tempfile.TemporaryDirectory() if makes else nullcontext("") as folder:
        names = [folder]
        if not is_alone:
            dist.broadcast_object_list(names)
        yield names[0]


def make(
    case: Case, mode: str | None = None, n_stages: int | None = None, **more: Any
) -> zbpp.Pipeline:
    """A pipeline of a case.

    Args:
        case: the training.
        mode: None: that of the case.
        n_stages: as above.
        more: a ``model`` in place of that of the case, an ``example`` and a
            ``memory_limit`` for its plan, and settings of `zbpp.Pipeline`.
    """
    mode, n_stages = mode or case.mode, n_stages or case.n_stages
    planned = {x: more.pop(x) for x in ("example", "memory_limit") if x in more}
    model: Any = more.pop("model", None) or case.of.layers()
    if case.given == "builder":
        model = zbpp.layers_from(case.of.build, n_layers=N_LAYERS, ties=case.of.ties)
    settings = _settings(case) | more
    if dist.is_initialized():
        n_stages = dist.get_world_size()
    else:
        settings["n_stages"] = n_stages
    schedule: Any = mode
    if case.parts:
        schedule = plan_in_parts(
            schedule, n_stages, case.n_microbatches, N_LAYERS // n_stages
        )
    if case.recompute is not None or case.split is not None:
        planned |= {"recompute": case.recompute, "split": case.split}
    if planned:
        alike = {k: x for k, x in settings.items() if k != "clip_grad_norm"}
        schedule = zbpp.plan_model(model, schedule, **planned, **alike)
    return zbpp.Pipeline(model, schedule, **settings)


def _settings(case: Case) -> dict[str, Any]:
    """Of `zbpp.Pipeline`, but for the model, the schedule and the processes."""
    optimizer = None if case.optimizer is None else OPTIMIZERS[case.optimizer]
    if case.snapshots and optimizer is not None:
        optimizer = unknown(optimizer)
    return {
        "n_microbatches": case.n_microbatches,
        "loss_fn": case.of.loss_fn,
        "optimizer": optimizer,
        "clip_grad_norm": case.clip,
        "device": case.device,
        "numerics": zbpp.Numerics(
            autocast=torch.bfloat16 if case.autocast else None,
            seed=case.seed,
            exact_sums=case.exact_sums,
            weigh=case.weigh,
        ),
        "step": zbpp.StepPolicy(
            post_validation=case.post_validation, loss_scale=case.loss_scale
        ),
        "execution": zbpp.Execution(
            compile=case.compile, overlap=case.overlap, timeout_s=60.0
        ),
    }


def unknown(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let optimizers be of classes that zbpp does not know."""

    @wraps(make)
    def build(parameters: Any) -> Any:
        built = make(parameters)
        for optimizer in built if isinstance(built, list) else [built]:
            kind = type(optimizer)
            optimizer.__class__ = type(kind.__name__, (kind,), {})
        return built

    return build


@cache
def plan_in_parts(
    mode: str, n_stages: int, n_microbatches: int, n_layers: int
) -> zbpp.Plan:
    """A plan for stages of layers that compute, exchange, compute and exchange."""
    from zbpp.core import Lane, Parts

    c, n = (Lane.COMPUTE, 0.5 / n_layers), (Lane.NETWORK, 0.33 / n_layers)
    costs = zbpp.Costs(parts=Parts((c, n, c, n), (n, c, n, c), (c, c), n_layers))
    request = zbpp.PlanRequest(
        schedule=mode,
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        costs=costs,
        effort="fast",
    )
    return zbpp.make_plan(request)


def _train(case: Case, pipeline: zbpp.Pipeline, trace: Trace, steps: range) -> None:
    results = []
    for step in steps:
        if case.optimizer is None:
            for _, p in pipeline.named_parameters():
                p.grad = None
        if not case.calls:
            results.append(pipeline.step(*case.batch(step)))
        else:
            for call in range(case.calls):
                batch = case.batch(step + 10 * call)
                pipeline.forward_backward(*batch, n_calls=case.calls)
            results.append(pipeline.optim_step())
        if case.switch is not None and step == 0:
            n, m = pipeline.schedule.n_stages, case.n_microbatches
            pipeline.switch(zbpp.plan(case.switch, n_stages=n, n_microbatches=m))
    for result in results:
        trace.losses.append(result.loss)
        trace.each.append(result.losses)
        trace.norms.append(result.grad_norm)
        trace.rollbacks += result.rollbacks


def _finish(case: Case, pipeline: zbpp.Pipeline, trace: Trace) -> Trace:
    """Evaluate and predict an uneven batch, and note what the stages hold."""
    inputs, targets = case.of.batch(EVALUATED, 7)
    trace.evaluation = pipeline.evaluate(inputs, targets, n_microbatches=3)
    inputs, _ = case.of.batch(EVALUATED, 7)  # layers may have written to the others
    outputs = pipeline.predict(inputs, n_microbatches=1)
    if pipeline.needs_targets:
        trace.prediction = _tensors(outputs)
    named = dict(pipeline.named_parameters())
    trace.parameters = {name: _copy(p) for name, p in named.items()}
    trace.buffers = {name: _copy(x) for name, x in pipeline.named_buffers()}
    if case.optimizer is None:
        trace.gradients = {
            k: _copy(p.grad) for k, p in named.items() if p.requires_grad
        }
        return trace
    for name, entries in pipeline.state_dict()["optimizer"].items():
        for entry in entries:
            trace.moments |= {
                f"{name} {key}": _copy(x)
                for key, x in entry["state"].items()
                if isinstance(x, Tensor)
            }
    return trace


def _tensors(value: Any) -> list[Tensor]:
    leaves = _pytree.tree_leaves(value)
    return [torch.atleast_1d(_copy(x)) for x in leaves if isinstance(x, Tensor)]


def _copy(x: Tensor) -> Tensor:
    whole = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole.detach().clone().cpu()


# ---- By a plain loop.


def reference(case: Case) -> Trace:
    """What a case must equal: the plain loop, or one stage where it has other bits."""
    numbers = {name: getattr(case, name) for name in NUMBERS}
    return _reference(Case(mode="FThenB", n_stages=1, post_validation=False, **numbers))


@cache
def _reference(case: Case) -> Trace:
    return run(case) if case.of.oracle == "stage" or case.compile else plain(case)


def plain(case: Case) -> Trace:
    """Train by a loop over micro-batches, with ``loss.backward()`` of each."""
    model = nn.Sequential(*case.of.layers())
    make = OPTIMIZERS[case.optimizer] if case.optimizer else lambda parameters: []
    optimizers = make(list(model.parameters()))
    if not isinstance(optimizers, list):
        optimizers = [optimizers]
    trace = Trace()
    for step in range(case.steps):
        model.zero_grad()
        calls = [case.batch(step + 10 * call) for call in range(max(1, case.calls))]
        _backward(case, model, calls, trace)
        norm = _norm(model)
        trace.norms.append(norm)
        if case.clip is not None and norm > case.clip:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(case.clip / (norm + 1e-6))
        for optimizer in optimizers:
            optimizer.step()
    model.eval()
    inputs, targets = case.of.batch(EVALUATED, 7)
    with torch.no_grad(), _autocast(case):
        trace.prediction = _tensors(model(case.of.split(inputs, 1)[0]))
        parts = zip(case.of.split(inputs, 3), targets.tensor_split(3), strict=True)
        losses = [case.of.loss_fn(model(x), y) for x, y in parts]
    weights = [_weight(case, y) for y in targets.tensor_split(3)]
    trace.evaluation = _mean(losses, weights)
    named = dict(model.named_parameters(remove_duplicate=False))
    trace.parameters = {f"layers.{k}": _copy(p) for k, p in named.items()}
    trace.buffers = {f"layers.{k}": _copy(x) for k, x in model.named_buffers()}
    if case.optimizer is None:
        trace.gradients = {
            f"layers.{k}": _copy(p.grad) for k, p in named.items() if p.requires_grad
        }
    for name, p in model.named_parameters():
        for state in (x.state[p] for x in optimizers if p in x.state):
            trace.moments |= {
                f"layers.{name} {key}": _copy(x)
                for key, x in state.items()
                if isinstance(x, Tensor)
            }
    return trace


def _backward(case: Case, model: nn.Module, calls: list[Any], trace: Trace) -> None:
    """Losses and gradients of a step."""
    parts: list[tuple[Any, Tensor]] = []
    for inputs, targets in calls:
        n = case.n_microbatches
        parts += zip(case.of.split(inputs, n), targets.tensor_split(n), strict=True)
    weights = [_weight(case, y) for _, y in parts]
    losses, scale = [], case.loss_scale or 1.0
    for (x, y), weight in zip(parts, weights, strict=True):
        with _autocast(case):
            loss = case.of.loss_fn(model(x), y)
        losses.append(loss.detach())
        (loss * (weight / sum(weights) * scale)).backward()
    for p in model.parameters():
        if p.grad is not None and case.loss_scale:
            p.grad.mul_(1 / scale)
    trace.each.append(tuple(map(float, losses)))
    trace.losses.append(_mean(losses, weights))


def _autocast(case: Case) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if case.autocast else nullcontext()


def _weight(case: Case, targets: Tensor) -> int:
    return int((targets != -100).sum()) if case.weigh == "tokens" else len(targets)


def _mean(losses: Sequence[Tensor], weights: Sequence[int]) -> float:
    values = torch.stack([*losses]).double()
    if len(set(weights)) == 1:
        return float(values.mean())
    shares = torch.tensor(weights, dtype=torch.float64)
    return float((values * shares).sum() / shares.sum())


def _norm(model: nn.Sequential) -> float:
    """Of all gradients: sums in float64, layer by layer, as the pipeline adds."""
    seen: set[nn.Parameter] = set()
    squares = torch.zeros(len(model), dtype=torch.float64)
    for index, layer in enumerate(model):
        gradients = [p.grad for p in layer.parameters() if p not in seen]
        seen |= set(layer.parameters())
        norms = [
            (torch.view_as_real(g) if g.is_complex() else g.to_dense()).norm(
                dtype=torch.float64
            )
            for g in gradients
            if g is not None
        ]
        if norms:
            squares[index] = torch.stack(norms).square().sum()
    return float(squares.sum().sqrt())


# ---- The comparison.


def difference(
    found: Trace, expected: Trace, *, is_exact: bool = True, rounding: float = 1e-4
) -> str | None:
    """The first place in which two traces differ, in a bit or by more than rounding."""
    for one in fields(Trace):
        if one.name == "rollbacks":
            continue
        here, there = getattr(found, one.name), getattr(expected, one.name)
        pairs = _pairs(here, there)
        if pairs is None:
            return f"{one.name} has {_shape(here)} here, and {_shape(there)} there"
        for place, x, y in pairs:
            if not _is_same(x, y, None if is_exact else rounding):
                return f"{one.name} differs at {place}: {x} and {y}"
    return None


def _pairs(here: Any, there: Any) -> list[tuple[Any, Any, Any]] | None:
    """Values at the same places; None: they have others."""
    if isinstance(here, Mapping) and isinstance(there, Mapping):
        if here.keys() != there.keys():
            return None
        return [(key, here[key], there[key]) for key in here]
    if isinstance(here, list) and isinstance(there, list):
        if len(here) != len(there):
            return None
        return [(i, *pair) for i, pair in enumerate(zip(here, there, strict=True))]
    return [("all", here, there)]


def _shape(value: Any) -> Any:
    return sorted(value) if isinstance(value, Mapping) else value


def _is_same(x: Any, y: Any, rounding: float | None) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor) and rounding is None:
        return x.dtype == y.dtype and torch.equal(x, y)
    if rounding is None or x is None or y is None:
        return bool(x == y)
    try:
        torch.testing.assert_close(x, y, rtol=rounding, atol=rounding / 10)
    except AssertionError:
        return False
    return True
