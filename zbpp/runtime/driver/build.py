"""Build transports, layers, optimizers and executors of one process."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import nn

from zbpp.core import (
    Pass,
    PassKind,
    Program,
    RequestError,
    Send,
    Step,
    TiedGradient,
)
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.comm.mailbox import Mailbox
from zbpp.runtime.comm.place import TENSOR_DIM, Place
from zbpp.runtime.comm.transport import LocalHub, Transport
from zbpp.runtime.compiled.backend import Call, Compiling, compiled, is_worth_it
from zbpp.runtime.driver.agreement import agreement, check_chosen
from zbpp.runtime.driver.stages import LocalStages
from zbpp.runtime.executor import Executor
from zbpp.runtime.job_times import JobTimes
from zbpp.runtime.layer_random import LayerRandom, next_seed
from zbpp.runtime.loss import LossFn
from zbpp.runtime.microbatches import Weigh, WeighName
from zbpp.runtime.optim.make import MakeOptimizer
from zbpp.runtime.optim.stage_optimizer import StageOptimizer
from zbpp.runtime.overlap import Overlap
from zbpp.runtime.parallel.bind import bind_parallel
from zbpp.runtime.partition import build_chunks
from zbpp.runtime.policies import DataParallel, Execution, Numerics, StepPolicy
from zbpp.runtime.recompute import Slices
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.sharded import layout_of, own_shard
from zbpp.runtime.ties.bind import bind_ties
from zbpp.runtime.ties.plan import TiePlan
from zbpp.runtime.ties.stage import StageTies

StageLayers = Mapping[int, tuple[Sequence[Chunk], StageTies]]
"""Chunks and ties of each stage of this process."""

_PART = "compiles"
"""Attribute of a layer: the name of the module in it to compile; None: none."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of every stage; `zbpp.Pipeline` explains the fields.

    Ranks compare its ``repr``, which leaves out what may differ between them.
    """

    ties: TiePlan
    """With the layers of each chunk and the placement of the chunks."""
    step: StepPolicy
    """With ``post_validation`` False where the schedule has no V's."""
    clip_grad_norm: float | None
    numerics: Numerics
    """A ``weigh`` that is a function is None here: each rank has another object."""
    replicas: DataParallel
    recompute: frozenset[int]
    """Layers of the whole model whose graph B computes again."""
    execution: Execution = field(repr=False)
    """With time-outs, which may differ."""
    weigh: WeighName | Weigh = field(repr=False)
    loss_fn: LossFn = field(repr=False)
    optimizer: MakeOptimizer | None = field(repr=False)
    device: torch.device = field(repr=False)


def build(
    settings: Settings,
    programs: Sequence[Program],
    place: Place,
    make_layers: Callable[[range], Sequence[nn.Module]],
    parts: Mapping[str, nn.Module] | None,
) -> LocalStages:
    """Build the stages of this process; all processes must call.

    ``parts`` are the modules of a model that exists: those that only other processes
    train are released. None: ``make_layers`` makes new ones.
    """
    seed: int = place.gather(next_seed())[0]
    transports = _transports(programs, place, settings)
    transport = next(iter(transports.values()))
    with agreement(transport.gather) as facts:
        if transport.on_device and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            raise RequestError(
                "CUDA_DEVICE_MAX_CONNECTIONS is 1: a message that waits for its other "
                "end blocks every job that is launched after it, so that stages may "
                "wait for each other for ever; leave the variable unset, or set it to "
                "32"
            )
        layers = _build_layers(
            make_layers, transports, settings, seed=seed if parts is None else None
        )
        facts |= _describe_layers(layers, settings.ties)
    with agreement(transport.gather):
        executors = _build_executors(layers, transports, settings, place, seed)
    _share_first_bits(executors, settings.ties)
    if settings.optimizer is not None:
        check_chosen(executors)
    stages = LocalStages(executors)
    if parts is not None:
        _release(parts, (layer for _, layer in stages.layers()))
    return stages


def _transports(
    programs: Sequence[Program], place: Place, settings: Settings
) -> dict[int, Transport]:
    """Make the transport of this process's stage, or of all where it is alone."""
    if place.everyone is None or place.n_ranks == 1:
        return dict(enumerate(LocalHub(len(programs)).transports()))
    mailbox = Mailbox(
        place,
        [{i.peer for i in x if isinstance(i, Send)} for x in programs],
        next(i for i, x in enumerate(programs) if Pass(PassKind.F, 0, 0) in x),
        device=settings.device,
        timeout_s=settings.execution.timeout_s,
        first_timeout_s=settings.execution.start_timeout_s,
    )
    return {mailbox.stage: mailbox}


def _build_layers(
    build: Callable[[range], Sequence[nn.Module]],
    stages: Iterable[int],
    settings: Settings,
    *,
    seed: int | None,
) -> StageLayers:
    """Build the layers of these stages; the seed is for a function that makes them."""
    plan, device = settings.ties, settings.device
    chunks_of = {stage: plan.placement.chunks_of[stage] for stage in stages}
    here = list(chain.from_iterable(chunks_of.values()))
    is_whole = len(here) == len(plan.ranges)
    if seed is not None and not is_whole:
        build = partial(_build_seeded, build, seed, device)
    built = build_chunks(
        build,
        plan.ranges,
        here,
        at_once=seed is not None,
        own_name=plan.own_name,
    )
    chunks = {chunk.index: chunk for chunk in built}
    for chunk in built:
        for index, layer in chunk.numbered():
            _refuse_meta(layer, index, device)
            layer.to(device)
    of_stages = {stage: [chunks[i] for i in chunks_of[stage]] for stage in stages}
    ties = bind_ties(plan, of_stages)
    return {stage: (of_stages[stage], ties[stage]) for stage in stages}


def _build_seeded(
    build: Callable[[range], Sequence[nn.Module]],
    seed: int,
    device: torch.device,
    layers: range,
) -> Sequence[nn.Module]:
    """Build a chunk from other random numbers than those of the other chunks.

    Torch's generators stay as they were, so loaders shuffle alike on all ranks.
    """
    kind, on_gpu = device.type, device.type not in ("cpu", "meta")
    devices = [device.index or 0] if on_gpu else []
    with torch.random.fork_rng(devices, device_type=kind if on_gpu else "cuda"):
        torch.manual_seed((seed + layers.start) % 2**63)
        return build(layers)


def _describe_layers(layers: StageLayers, plan: TiePlan) -> dict[str, object]:
    """Facts on the parameters of a stage that all processes with them must share."""
    facts: dict[str, object] = {}
    for stage, (chunks, ties) in layers.items():
        facts[f"layers of stage {stage}"] = [
            (name, *_describe(p))
            for chunk in chunks
            for _, name, p in chunk.all_leaves()
        ]
        for number, tie in ties.parameters.items():
            placements = layout_of(tie.parameter)[1:]
            facts[f"copies of {plan.name(number)}"] = (
                _describe(tie.parameter),
                placements,
            )
    return facts


def _describe(p: nn.Parameter) -> tuple[object, ...]:
    return tuple(p.shape), p.dtype, p.requires_grad


def _build_executors(
    layers: StageLayers,
    transports: dict[int, Transport],
    settings: Settings,
    place: Place,
    seed: int,
) -> dict[int, Executor]:
    """Build the optimizer and the executor of each local stage."""
    ties, device = settings.ties, settings.device
    numerics, execution = settings.numerics, settings.execution
    random = LayerRandom(device, (place.replica, place.sequence_slice))
    random.use(seed if numerics.seed is None else numerics.seed)
    executors = {}
    for stage, transport in transports.items():
        stage_chunks, tied = layers[stage]
        times = JobTimes(device)
        overlap, slices = Overlap(device, stops=execution.overlap), None
        if execution.partition_activations:
            slices = Slices(place.group(TENSOR_DIM), overlap)
        stage_chunks, collectives = bind_parallel(
            stage_chunks,
            place,
            settings.replicas,
            tied=[x.parameter for x in tied.parameters.values()],
            aliases=tied.aliases,
            now=times.now,
        )
        stage_chunks = [
            compiled_chunk(chunk, execution.compile) for chunk in stage_chunks
        ]
        runner = Stage(
            stage_chunks,
            n_chunks=ties.placement.n_chunks,
            loss_fn=settings.loss_fn,
            device=device,
            autocast=numerics.autocast,
            exact_sums=numerics.exact_sums,
            recompute=settings.recompute,
            slices=slices,
            ties=tied,
            random=random,
        )
        share = StageOptimizer(
            runner,
            make_optimizer=settings.optimizer,
            n_layers=ties.ranges[-1].stop,
            policy=settings.step,
            clip_grad_norm=settings.clip_grad_norm,
            own_name=ties.own_name,
            top_k=collectives.top_k,
        )
        executors[stage] = Executor(
            runner,
            transport,
            share,
            stage_of=ties.placement.stage_of,
            collectives=collectives,
            times=times,
            overlap=overlap,
        )
    return executors


@torch.no_grad()
def _share_first_bits(executors: Mapping[int, Executor], plan: TiePlan) -> None:
    """Broadcast each tied parameter from the stage of its first layer.

    Layers of one process share its memory already.
    """
    if len(executors) > 1:
        return
    for tie, chunks in enumerate(plan.chunks):
        first, *others = plan.stages(tie)
        value = TiedGradient(tie, chunks[0])
        if first in executors:
            # A copy: the first step, or a load, may write before it has left.
            parameter = executors[first].stage.ties.parameters[tie].parameter
            copy = own_shard(parameter).detach().clone()
            for peer in others:
                executors[first].transport.send(value, (copy,), peer)
        for stage in others:
            if stage in executors:
                transport = executors[stage].transport
                copy = own_shard(executors[stage].stage.ties.parameters[tie].parameter)
                expected = transport.post(value, first, (copy.detach(),))
                copy.copy_(expected.receive(Step(stage))[0])


def _refuse_meta(layer: nn.Module, index: int, device: torch.device) -> None:
    """Refuse a layer without weights on a device that computes."""
    if device.type == "meta":
        return
    for name, tensor in chain(layer.named_parameters(), layer.named_buffers()):
        if tensor.is_meta:
            raise RequestError(
                f"layers.{index}.{name} is on the meta device, without values; "
                "give a builder that makes a range of layers with their weights, or "
                "zbpp.cut(model, blocks, weights=...); if another zbpp.Pipeline has "
                "released it, give a new model"
            )


def compiled_chunk(chunk: Chunk, how: Compiling) -> Chunk:
    """Return a chunk whose layers' calls are compiled; its modules stay as they are."""
    if not how:
        return chunk
    calls = {
        index: call
        for index, layer in chunk.numbered()
        if (call := _compiled_layer(layer)) is not None
    }
    return replace(chunk, calls=calls)


def _compiled_layer(layer: nn.Module) -> Call | None:
    """Return the call of a layer, compiled as a whole or in part; None: neither."""
    name = getattr(layer, _PART, "")
    if name is None:
        return None
    if not name:
        return compiled(layer) if is_worth_it(layer) else None
    modules: dict[str, Any] = layer._modules
    part = compiled(modules[name])

    def call(value: object) -> object:
        module, modules[name] = modules[name], part
        try:
            output: object = layer(value)
        finally:
            modules[name] = module
        return output

    return call


class _Released:
    """A hook that refuses the use of a module; so does a copy or pickle of it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any) -> NoReturn:
        raise RequestError(
            f"{self._name} is trained by another process, and zbpp.Pipeline has "
            "released its initial weights here: pipeline.save(folder) on every rank "
            "writes the whole model, and zbpp.checkpoint.load(folder, new_model) loads "
            "it into a plain one; pipeline.evaluate and pipeline.predict run it"
        )

    def __reduce__(self) -> NoReturn:
        self()


def _release(parts: Mapping[str, nn.Module], layers: Iterable[nn.Module]) -> None:
    """Move what no layer of this process uses to the meta device, and refuse its use.

    Nothing updates these weights: to read them after a step is to read stale values.
    """
    modules = dict.fromkeys(m for layer in layers for m in layer.modules())
    used = {
        id(tensor)
        for module in modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
    }
    for name, part in parts.items():
        refuse = _Released(name)
        for module in part.modules():
            if module not in modules and _empty(module, used):
                module.register_forward_pre_hook(refuse)
                hooked: Any = module  # torch has no type for this method
                hooked.register_state_dict_pre_hook(refuse)


def _empty(module: nn.Module, used: set[int]) -> bool:
    """Move a module's tensors to the meta device; True if there were any."""
    moved = False
    homes: tuple[dict[str, Any], ...] = module._parameters, module._buffers
    for tensors in homes:
        for key, tensor in tensors.items():
            if tensor is not None and id(tensor) not in used and not tensor.is_meta:
                meta = tensor.detach().to("meta")
                if isinstance(tensor, nn.Parameter):
                    meta = nn.Parameter(meta, requires_grad=tensor.requires_grad)
                tensors[key] = meta
                moved = True
    return moved
