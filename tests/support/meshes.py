"""Trainings on a mesh: a `MeshCase` and its `cases.Trace`.

run(case)          as one rank of the mesh
plain(case)        by a plain loop in one process, all samples and tokens at once
reference(case)    the case that must have the same bits: 1F1B on the same mesh
"""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from cases import Trace
from mesh_model import WORDS, Model
from torch import Tensor, nn
from torch.nn import functional

import zbpp
from zbpp.runtime.testing import small_buckets

SAMPLES, TOKENS, N_STEPS, N_MICROBATCHES = 16, 8, 3, 4
EVALUATED, PREDICTED = 99, 98
"""Steps whose batches are evaluated and predicted at the end."""


@dataclass(frozen=True)
class Kind:
    """A mesh, and how its processes share the layers.

    Args:
        sizes: of the mesh, but for its stages.
        options: of `zbpp.DataParallel`.
        wrap: what wraps the layers before the pipeline has them.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    wrap: str = ""

    @property
    def sums(self) -> bool:
        """True if gradients of the layers without experts are summed over processes."""
        return bool(self.wrap) or any(
            n > 1 for name, n in self.sizes.items() if name != "tensor_parallel"
        )

    @property
    def n_peers(self) -> int:
        """Processes of a stage."""
        return prod(n for name, n in self.sizes.items() if name != "replicate")


DP, TP, CP, EP = ({f"{x}_parallel": 2} for x in ("data", "tensor", "context", "expert"))
KINDS = {
    "none": Kind(),
    "dp": Kind(DP),
    "optimizer": Kind(DP, {"shard": "optimizer"}),
    "gradients": Kind(DP, {"shard": "gradients"}),
    "parameters": Kind(DP, {"shard": "parameters"}),
    "buffers": Kind(DP, {"shard": "parameters", "alternating_buffers": True}),
    "replicate": Kind(DP, wrap="replicate"),
    "fsdp resharded": Kind(DP, wrap="resharded"),
    "fsdp in part": Kind(DP, wrap="part"),
    "fsdp of one": Kind(wrap="resharded"),
    "hsdp": Kind({"data_parallel": 4, "replicate": 2}, wrap="whole"),
    "tp": Kind(TP),
    "tp dp": Kind(DP | TP),
    "cp": Kind(CP),
    "ep": Kind(EP),
    "ep optimizer": Kind(EP, {"shard": "optimizer"}),
    "dp ep": Kind(DP | EP, {"shard": "parameters"}),
    "cp ep": Kind(CP | EP, {"shard": "gradients"}),
}


@dataclass(frozen=True, kw_only=True)
class MeshCase:
    """A training on a mesh.

    Args:
        kind: a name in `KINDS`.
        uses: parameters of replicas: ``"some"``, other ones than the others use;
            ``"no layer"``, one leaves out a layer; ``"none of one"``, none uses one.
        weights: ``"plain"``, ``"tied"`` or ``"frozen"``.
        optimizer: a name in `OPTIMIZERS`.
        numbers: ``"float64"``, ``"autocast"`` to bfloat16, or ``"narrow"``: computed in
            bfloat16 and summed in float32 by `fully_shard`.
        stages: of the mesh.
        mode: of the schedule.
        validation: ``"always"`` late, with ``"small buckets"``, or at a ``"barrier"``.
        recompute: ``"none"``, ``"some"`` layers, or ``"within"`` all layers.
        halfway: ``"switch"`` to other orders, ``"resume"`` from a checkpoint of another
            mode, or one of ``"elsewhere"``, of two replicas.
        weigh: as in `zbpp.Numerics`; ``"default"``: tokens.
    """

    kind: str
    uses: str = "some"
    weights: str = "plain"
    optimizer: str = "adamw"
    numbers: str = "float64"
    stages: int = 2
    mode: str = "ZBV"
    validation: str = "always"
    recompute: str = "none"
    halfway: str = "nothing"
    weigh: str | None = "default"

    @property
    def n_ranks(self) -> int:
        """Processes of the mesh."""
        return self.stages * KINDS[self.kind].n_peers

    @property
    def clip(self) -> float:
        """The largest norm: some steps are clipped, and not others."""
        return 3.4 if self.weights == "tied" else 2.7


class Unknown(torch.optim.NAdam):
    """An optimizer that zbpp does not know: it copies what a step changes."""


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "unknown": partial(Unknown, lr=1e-2),
}


def batch(step: int, uses: str = "some") -> tuple[Tensor, Tensor]:
    """Words, and words to predict for some: more at the ends of the sequences.

    Where many count, as in every second step, the gradient is small.
    """
    generator = torch.Generator().manual_seed(100 + step)
    draw = partial(torch.randint, generator=generator)
    x, y = draw(WORDS, (SAMPLES, TOKENS)), draw(WORDS, (SAMPLES, TOKENS))
    most = torch.arange(TOKENS) + (TOKENS if step % 2 else 0)
    counts = draw(2 * TOKENS, (SAMPLES, TOKENS)) <= most
    rows, columns = torch.arange(SAMPLES)[:, None], torch.arange(TOKENS)
    # words 4 and 5 are of the tables; the second replica, or slice, has none of 4
    second = (rows >= SAMPLES // 2) | (columns >= TOKENS // 2)
    x = torch.where(second & (x % 4 == 0), x + 2, x)
    x = torch.where(~second & (rows % 4 < 2) & (x % 4 == 1), x + 2, x)
    x[:, 0] = torch.where(second[:, 0], 5, 4)
    if uses == "no layer":
        x = torch.where(second & (x % 4 == 1), x + 2, x)
    return x, torch.where(counts, y, -100)


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = functional.cross_entropy(outputs.flatten(0, 1).double(), targets.flatten())
    return 3.0 * loss


def model_of(case: MeshCase, mesh: Any = None) -> Model:
    """The model, with this process's part of its parameters."""
    model = Model(
        mesh,
        dtype=torch.float64 if case.numbers == "float64" else torch.float32,
        tied=case.weights == "tied",
        frozen=case.weights == "frozen",
        idle=case.uses == "none of one",
    )
    for block in model.blocks:
        block.checkpointed = case.recompute == "within"
    return model


# ---- On a mesh.


def run(case: MeshCase, folder: str = "", **more: Any) -> Trace:
    """Train as one rank of the mesh.

    Args:
        case: the training.
        folder: for its checkpoints, the same on all ranks.
        more: arguments of the pipeline.
    """
    trace = Trace()
    buckets = case.validation == "small buckets"
    with small_buckets() if buckets else nullcontext():
        first = _first_half(case)
        if first is not None:
            with pipeline_of(first, **more) as pipeline:
                _train(case, pipeline, trace, N_STEPS - 1)
                pipeline.save(folder, wait=True)
        with pipeline_of(case, **more) as pipeline:
            if first is not None:
                pipeline.load(folder)
            _train(case, pipeline, trace, N_STEPS)
            _finish(case, pipeline, trace)
    return trace


def _first_half(case: MeshCase) -> MeshCase | None:
    """The case that trains all steps but the last one; None: it is the same."""
    if case.halfway == "resume":
        return replace(case, mode="ZBH1")
    if case.halfway == "elsewhere":
        return replace(case, kind="dp", stages=case.n_ranks // 2)
    return None


def pipeline_of(
    case: MeshCase, *, model: Model | None = None, **more: Any
) -> zbpp.Pipeline:
    """The pipeline of a case, on all ranks.

    Args:
        case: the training.
        model: None: that of the case.
        more: arguments of the pipeline.
    """
    kind = KINDS[case.kind]
    mesh, processes = None, None
    if kind.sizes or kind.wrap:
        mesh = zbpp.mesh(stages=case.stages, **kind.sizes)
        processes = zbpp.DataParallel(mesh=mesh, **kind.options)
    model = model_of(case, mesh) if model is None else model
    if kind.wrap:
        _wrap(model.layers(), case, mesh)
    source: Any = model.layers()
    weigh = None if "context_parallel" in kind.sizes else "tokens"
    settings: dict[str, Any] = {
        "loss_fn": loss_fn,
        "optimizer": OPTIMIZERS[case.optimizer],
        "n_microbatches": N_MICROBATCHES,
        "mesh": processes,
        "device": "cpu",
        "numerics": zbpp.Numerics(
            weigh=weigh if case.weigh == "default" else case.weigh,
            autocast=torch.bfloat16 if case.numbers == "autocast" else None,
        ),
        "step": zbpp.StepPolicy(post_validation=case.validation != "barrier"),
    } | more
    schedule: Any = case.mode
    if case.recompute == "some":
        schedule = zbpp.plan_model(source, case.mode, recompute={1, 3, 6}, **settings)
    settings = {"clip_grad_norm": case.clip} | settings
    return zbpp.Pipeline(source, schedule, **settings)


def _wrap(layers: list[nn.Module], case: MeshCase, mesh: Any) -> None:
    """Wrap the layers by torch's own functions."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kind, policy = KINDS[case.kind], MixedPrecisionPolicy()
    part = mesh["dp_replicate", "dp_shard"] if kind.n_peers == 4 else mesh["dp"]
    if case.numbers == "narrow":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in layers:
        if kind.wrap == "replicate":
            replicate(layer, mesh=part, mp_policy=policy)
        elif kind.wrap == "part":
            for child in layer.children():
                if isinstance(child, nn.LayerNorm):
                    fully_shard(child, mesh=part, mp_policy=policy)
        else:
            fully_shard(
                layer,
                mesh=part,
                reshard_after_forward=kind.wrap == "resharded",
                mp_policy=policy,
            )


def share(pipeline: zbpp.Pipeline, step: int, uses: str) -> tuple[Tensor, Tensor]:
    """The part of a batch that this process reads."""
    place = pipeline.place

    def part(whole: Tensor) -> Tensor:
        samples = whole.chunk(place.n_replicas)[place.replica]
        return samples.chunk(place.n_sequence_slices, 1)[place.sequence_slice]

    x, y = batch(step, uses)
    return part(x), part(y)


def _train(case: MeshCase, pipeline: zbpp.Pipeline, trace: Trace, end: int) -> None:
    """Take the steps up to one."""
    for step in range(pipeline.n_steps, end):
        result = pipeline.step(*share(pipeline, step, case.uses))
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.rollbacks += result.rollbacks
        if step == 0 and case.halfway == "switch":
            now, costs = pipeline.schedule, zbpp.Costs(f=1, b=3, w=2)
            n, m = now.n_stages, now.n_microbatches
            pipeline.switch(
                zbpp.plan(case.mode, n_stages=n, n_microbatches=m, costs=costs)
            )


def _finish(case: MeshCase, pipeline: zbpp.Pipeline, trace: Trace) -> None:
    """Evaluate, predict, and note what the stages hold."""
    trace.evaluation = pipeline.evaluate(*share(pipeline, EVALUATED, case.uses))
    words, _ = share(pipeline, PREDICTED, case.uses)
    place = pipeline.place
    mine = pipeline.predict(words, everywhere=True)
    parts = {
        (replica, part): outputs
        for replica, part, outputs in pipeline.gather(
            (place.replica, place.sequence_slice, mine)
        )
    }
    columns = [
        torch.cat([parts[i, j] for i in range(place.n_replicas)])
        for j in range(place.n_sequence_slices)
    ]
    trace.prediction = [torch.cat(columns, 1)]
    state = pipeline.state_dict()
    for name, p in state["model"].items():
        trace.parameters[_layer_name(name)] = _whole(p)
    for name, entries in state["optimizer"].items():
        for entry in entries:
            trace.moments |= dict(_moments(_layer_name(name), entry["state"]))


def _moments(name: str, state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if isinstance(value, Tensor):
            yield f"{name} {key}", _whole(value)


def _whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def _layer_name(name: str) -> str:
    """The name that a parameter of a model has in a list of its layers."""
    name = re.sub(r"^table\.", "layers.0.", name)
    name = re.sub(r"^blocks\.(\d+)\.", lambda x: f"layers.{int(x[1]) + 1}.", name)
    return re.sub(r"^head\.", "layers.6.", name)


# ---- What it must equal.


def reference(case: MeshCase) -> MeshCase:
    """The case of the same mesh, numbers and checkpoint that has the same bits."""
    kind = KINDS[case.kind]
    return replace(
        case,
        mode="1F1B",
        stages=2 if kind.n_peers == 1 or "group" in kind.options else 1,
        validation="barrier",
        recompute="none",
        halfway="elsewhere" if case.halfway == "elsewhere" else "nothing",
    )


def plain(case: MeshCase, *, zeros: bool = False) -> Trace:
    """Train in one process, by one backward of the whole batch.

    Args:
        case: the training.
        zeros: parameters that no sample uses have gradients of zeros.
    """
    model = model_of(replace(case, kind="none", recompute="none"))
    optimizer = OPTIMIZERS[case.optimizer](list(model.parameters()))
    trace = Trace()
    for step in range(N_STEPS):
        x, y = batch(step, case.uses)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.numbers == "autocast"):
            outputs = model(x)
        loss = loss_fn(outputs, y)
        loss.backward()
        for p in model.parameters() if zeros else ():
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        squares = [x.double().square().sum() for x in gradients]
        norm = float(torch.stack(squares).sum().sqrt())
        for gradient in gradients:
            gradient *= min(1.0, case.clip / (norm + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(float(loss.detach()))
        trace.norms.append(norm)
        trace.rollbacks += norm > case.clip
    with torch.no_grad():
        x, y = batch(EVALUATED, case.uses)
        trace.evaluation = float(loss_fn(model(x), y))
        trace.prediction = [model(batch(PREDICTED, case.uses)[0])]
    for name, p in model.named_parameters(remove_duplicate=False):
        trace.parameters[_layer_name(name)] = p.detach()
    for name, p in model.named_parameters():
        trace.moments |= dict(_moments(_layer_name(name), optimizer.state[p]))
    return trace
