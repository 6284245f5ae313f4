"""One training of any kind, and its plain loop: `Case` -> what it shows, by name.

    run(case)                   by a pipeline, in this process or on ranks of the pool
    on_ranks(pool, case, 2)     the same in two processes, their parts joined
    plain(case)                 by a loop over micro-batches in plain torch
    reference(case)             that, or one stage where no plain loop has the bits

The settings that decide the numbers (`NUMBERS`) are read by both; all others must
change no bit. `meshes.MeshCase` is a case on a mesh.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import same
import torch
import torch.distributed as dist
from case_models import MODELS, N_LAYERS, Model
from optimizers import OPTIMIZERS, unknown
from same import copy_of
from small import in_policies
from torch import Tensor, nn
from torch.utils import _pytree

import zbpp
from zbpp import Schedule
from zbpp.runtime.testing import small_buckets

__all__ = [
    "Case",
    "Loop",
    "Shown",
    "difference",
    "make",
    "merged",
    "on_ranks",
    "plain",
    "plan_in_parts",
    "reference",
    "run",
]

EVALUATED = 99
"""The step whose batch is evaluated and predicted at the end."""

Shown = dict[str, Any]
"""Losses, norms, an evaluation, a prediction; and tensors of the end by name.

``rollbacks`` are not compared: they depend on how steps are validated.
"""


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
        partition_activations: as in `zbpp.Execution`.
        post_validation: as in `zbpp.StepPolicy`.
        snapshots: the optimizer's class is one that zbpp does not know.
        offload_optimizer: as in `zbpp.StepPolicy`.
        buckets: the optimizer steps small parts of its parameters.
        calls: of ``forward_backward`` for each step; 0: ``step`` is called.
        optimizer: a name in `optimizers.OPTIMIZERS`, or None.
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
        timeout_s: as in `zbpp.Execution`.
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
    partition_activations: bool = False
    post_validation: bool | None = None
    snapshots: bool = False
    offload_optimizer: bool = False
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
    timeout_s: float = 60.0

    n_evaluated = 7
    """Samples of the batch at the end."""

    @property
    def of(self) -> Model:
        """The model."""
        return MODELS[self.model]

    @property
    def rounding(self) -> float | None:
        """What numbers may differ by from those of the reference; None: no bit may."""
        return None if self.exact_sums and self.of.oracle != "close" else 1e-4

    @property
    def first_half(self) -> "Case | None":
        """The case that takes the first steps, up to a checkpoint."""
        if self.resume is None:
            return None
        mode, n_stages = self.resume
        return replace(self, mode=mode, n_stages=n_stages)

    def batch(self, step: int) -> tuple[Any, Tensor]:
        """Inputs and targets of a step."""
        samples = (self.samples,) if isinstance(self.samples, int) else self.samples
        return self.of.batch(step, samples[step % len(samples)])

    def share(self, pipeline: zbpp.Pipeline, *batch: Any) -> tuple[Any, ...]:
        """The part of a batch that the process of a pipeline reads."""
        return batch

    def place(self) -> dict[str, Any]:
        """Arguments of a pipeline on its mesh and device."""
        is_alone = not dist.is_initialized() and "RANK" not in os.environ
        return {"n_stages": self.n_stages} if is_alone else {}

    def layers(self, mesh: Any = None) -> Any:
        """The model as a pipeline takes it."""
        if self.given == "builder":
            ties = self.of.ties
            return zbpp.layers_from(self.of.build, n_layers=N_LAYERS, ties=ties)
        return self.of.layers()

    def around(self, pipeline: zbpp.Pipeline, step: int) -> AbstractContextManager[Any]:
        """What a script does around the call that takes a step."""
        return nullcontext()

    def predict(self, pipeline: zbpp.Pipeline) -> Any:
        """Outputs of that batch; None where the last chunk is not."""
        inputs, _ = self.of.batch(EVALUATED, self.n_evaluated)
        outputs = pipeline.predict(inputs, n_microbatches=1)
        return outputs if pipeline.needs_targets else None


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


# ---- By a pipeline.


def run(case: Case) -> Shown:
    """Train by a pipeline, in this process or as one rank of a process group."""
    shown = Shown(losses=[], each=[], norms=[], rollbacks=0)
    first, half = case.first_half, case.steps // 2
    place = nullcontext("") if first is None else _folder()
    with small_buckets() if case.buckets else nullcontext(), place as folder:
        if first is not None:
            with make(first) as pipeline:
                _train(first, pipeline, shown, range(half))
                pipeline.save(folder, wait=True)
        with make(case) as pipeline:
            if first is not None:
                pipeline.load(folder)
            _train(case, pipeline, shown, range(half if first else 0, case.steps))
            return shown | _end(case, pipeline)


def on_ranks(pool: Any, case: Case, n: int) -> Shown:
    """Train in n processes, and join what they show."""
    return merged(pool.run(_run, n, case))


def _run(case: Case) -> Shown:
    from cases import run  # by its module's name, so that the answer can be pickled

    return run(case)


def merged(ranks: Sequence[Shown]) -> Shown:
    """What all ranks show.

    Raises:
        AssertionError: two ranks contradict one another.
    """
    whole: Shown = {}
    for shown in ranks:
        both = whole.keys() & shown.keys()
        found = difference({x: shown[x] for x in both}, {x: whole[x] for x in both})
        assert found is None, f"ranks differ: {found}"
        whole |= shown
    return whole


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


def make(case: Case, mode: Any = None, n_stages: int | None = None, **more: Any) -> Any:
    """A pipeline of a case.

    Args:
        case: the training.
        mode: None: that of the case.
        n_stages: as above.
        more: a ``model`` in place of that of the case, an ``example`` and a
            ``memory_limit`` for its plan, and settings of `zbpp.Pipeline`.
    """
    case = replace(case, mode=mode or case.mode, n_stages=n_stages or case.n_stages)
    planned = {x: more.pop(x) for x in ("example", "memory_limit") if x in more}
    given = more.pop("model", None)
    settings = in_policies(case.place() | _settings(case) | more)
    model: Any = case.layers(settings.get("mesh")) if given is None else given
    schedule: Any = case.mode
    if case.parts:
        n = dist.get_world_size() if dist.is_initialized() else case.n_stages
        schedule = plan_in_parts(schedule, n, case.n_microbatches, N_LAYERS // n)
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
    same = ("n_microbatches", "device", "seed", "exact_sums", "weigh", "loss_scale")
    same += ("offload_optimizer", "post_validation", "compile", "overlap", "timeout_s")
    same += ("partition_activations",)
    return {name: getattr(case, name) for name in same} | {
        "loss_fn": case.of.loss_fn,
        "optimizer": optimizer,
        "clip_grad_norm": case.clip,
        "autocast": torch.bfloat16 if case.autocast else None,
    }


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


def _train(
    case: Case, pipeline: zbpp.Pipeline, shown: Shown, steps: Iterable[int]
) -> None:
    results = []
    for step in steps:
        if case.optimizer is None:
            for _, p in pipeline.named_parameters():
                p.grad = None
        for call in range(max(1, case.calls)):
            batch = case.share(pipeline, *case.batch(step + 10 * call))
            with case.around(pipeline, step):
                if case.calls:
                    pipeline.forward_backward(*batch, n_calls=case.calls)
                else:
                    results.append(pipeline.step(*batch))
            for x in _pytree.tree_leaves(batch):  # a script may refill its batch
                x.zero_()
        if case.calls:
            results.append(pipeline.optim_step())
        if case.switch is not None and step == 0:
            n, m = pipeline.schedule.n_stages, case.n_microbatches
            costs = zbpp.Costs(f=1, b=3, w=2)
            pipeline.switch(
                zbpp.plan(case.switch, n_stages=n, n_microbatches=m, costs=costs)
            )
    for result in results:
        shown["losses"].append(result.loss)
        shown["each"].append(result.losses)
        shown["norms"].append(result.grad_norm)
        shown["rollbacks"] += result.rollbacks


def _end(case: Case, pipeline: zbpp.Pipeline) -> Shown:
    """Evaluate and predict; the state of the stages."""
    batch = case.share(pipeline, *case.of.batch(EVALUATED, case.n_evaluated))
    shown: Shown = {"evaluation": pipeline.evaluate(*batch, n_microbatches=3)}
    if (outputs := case.predict(pipeline)) is not None:
        shown["prediction"] = _tensors(outputs)
    named = dict(pipeline.named_parameters())
    shown |= {
        k: copy_of(x) for k, x in (named | dict(pipeline.named_buffers())).items()
    }
    if case.optimizer is None:
        return shown | _gradients(named)
    for name, entries in pipeline.state_dict()["optimizer"].items():
        for entry in entries:
            shown |= _moments(name, entry["state"])
    return shown


def _tensors(value: Any) -> list[Tensor]:
    leaves = _pytree.tree_leaves(value)
    return [torch.atleast_1d(copy_of(x)) for x in leaves if isinstance(x, Tensor)]


def _gradients(named: dict[str, nn.Parameter]) -> Shown:
    trained = {k: p for k, p in named.items() if p.requires_grad}
    return {f"gradient of {k}": copy_of(p.grad) for k, p in trained.items()}


def _moments(name: str, state: dict[str, Any]) -> Shown:
    tensors = {k: x for k, x in state.items() if isinstance(x, Tensor)}
    return {f"{name} {key}": copy_of(x) for key, x in tensors.items()}


# ---- By a plain loop.


def reference(case: Case) -> Shown:
    """What a case must equal: the plain loop, or one stage where it has other bits."""
    numbers = {name: getattr(case, name) for name in NUMBERS}
    return _reference(Case(mode="FThenB", n_stages=1, post_validation=False, **numbers))


@cache
def _reference(case: Case) -> Shown:
    return run(case) if case.of.oracle == "stage" or case.compile else plain(case)


def plain(case: Case, *, zeros: bool = False) -> Shown:
    """Train by a plain loop; see `Loop`."""
    loop = Loop(case, zeros=zeros)
    for _ in range(case.steps):
        loop.step()
    return loop.shown | loop.end()


class Loop:
    """A plain training: ``loss.backward()`` of each micro-batch, then a step.

    Args:
        case: the training.
        zeros: parameters that no sample uses have gradients of zeros.
    """

    def __init__(self, case: Case, *, zeros: bool = False) -> None:
        self.case, self.zeros, self.n_steps = case, zeros, 0
        self.model = nn.Sequential(*case.layers())
        make = OPTIMIZERS[case.optimizer] if case.optimizer else lambda parameters: []
        made = make(list(self.model.parameters()))
        self.optimizers = made if isinstance(made, list) else [made]
        self.shown = Shown(losses=[], each=[], norms=[], rollbacks=0)

    def step(self) -> None:
        """Take the next step."""
        case, model, shown = self.case, self.model, self.shown
        model.zero_grad()
        calls = range(max(1, case.calls))
        self._backward([case.batch(self.n_steps + 10 * call) for call in calls])
        for p in model.parameters() if self.zeros else ():
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
        groups = [group for one in self.optimizers for group in one.param_groups]
        stepped = {p for group in groups for p in group["params"]}
        norm = _norm(model, stepped or {*model.parameters()})
        shown["norms"].append(norm)
        if case.clip is not None and norm > case.clip:
            shown["rollbacks"] += 1
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(case.clip / (norm + 1e-6))
        for optimizer in self.optimizers:
            optimizer.step()
        self.n_steps += 1

    def _backward(self, calls: list[tuple[Any, Tensor]]) -> None:
        """Losses and gradients of a step."""
        case, parts = self.case, []
        for inputs, targets in calls:
            n = case.n_microbatches
            parts += zip(case.of.split(inputs, n), targets.tensor_split(n), strict=True)
        weights = [_weight(case, y) for _, y in parts]
        losses, scale = [], case.loss_scale or 1.0
        for (x, y), weight in zip(parts, weights, strict=True):
            with _autocast(case):
                loss = case.of.loss_fn(self.model(x), y)
            losses.append(loss.detach())
            (loss * (weight / sum(weights) * scale)).backward()
        for p in self.model.parameters():
            if p.grad is not None and case.loss_scale:
                p.grad.mul_(1 / scale)
        self.shown["each"].append(tuple(map(float, losses)))
        self.shown["losses"].append(_mean(losses, weights))

    def end(self) -> Shown:
        """An evaluation and a prediction, and what it has."""
        case, shown = self.case, Shown()
        model = self.model.eval()
        inputs, targets = case.of.batch(EVALUATED, case.n_evaluated)
        with torch.no_grad(), _autocast(case):
            shown["prediction"] = _tensors(model(case.of.split(inputs, 1)[0]))
            parts = zip(case.of.split(inputs, 3), targets.tensor_split(3), strict=True)
            losses = [case.of.loss_fn(model(x), y) for x, y in parts]
        weights = [_weight(case, y) for y in targets.tensor_split(3)]
        return shown | {"evaluation": _mean(losses, weights)} | self.numbers()

    def numbers(self) -> Shown:
        """Parameters and buffers, and the optimizers' state, or gradients."""
        model = self.model
        named = dict(model.named_parameters("layers", remove_duplicate=False))
        numbers = named | dict(model.named_buffers("layers"))
        shown = {name: copy_of(x) for name, x in numbers.items()}
        if not self.optimizers:
            return shown | _gradients(named)
        for name, p in model.named_parameters("layers"):
            for optimizer in self.optimizers:
                shown |= _moments(name, optimizer.state.get(p, {}))
        return shown


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


def _norm(model: nn.Sequential, left: set[nn.Parameter]) -> float:
    """Of gradients of these: sums in float64, layer by layer, as the pipeline adds."""
    squares = torch.zeros(len(model), dtype=torch.float64)
    for index, layer in enumerate(model):
        gradients = [p.grad for p in layer.parameters() if p in left]
        left = left - set(layer.parameters())
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


def difference(
    found: Shown, expected: Shown, *, rounding: float | None = None
) -> str | None:
    """The first place in which two trainings differ, in a bit or beyond rounding."""
    skipped = {"rollbacks": None}
    return same.difference(found | skipped, expected | skipped, rounding=rounding)
