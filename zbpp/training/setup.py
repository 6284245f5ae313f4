"""From the options of a run to its model, its plan and its pipeline.

All processes make the same of them; nothing before `build_pipeline` makes weights.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

from zbpp.core import (
    Costs,
    LayerCosts,
    PassKind,
    Placement,
    RequestError,
    Schedule,
    is_layers_file,
    read_costs,
    read_layers,
)
from zbpp.core.costs.units import is_limit_in_bytes, with_limit
from zbpp.core.measured import not_told_apart
from zbpp.memory import layer_memory
from zbpp.models import layered_of
from zbpp.models.configs.byte_model import TextModel, read_causal_lm
from zbpp.pipeline import Pipeline, plan_model
from zbpp.planning import Plan, PlanRequest, is_auto, is_file, make_plan
from zbpp.planning.pipelines import split_of, split_on
from zbpp.runtime.parallel.mesh import make_mesh
from zbpp.runtime.partition import partition_layers
from zbpp.runtime.policies import (
    DataParallel,
    Execution,
    LossScaler,
    Numerics,
    StepPolicy,
)
from zbpp.runtime.support.devices import asked_device
from zbpp.training.data import load_corpus
from zbpp.training.llama import LlamaConfig, dealt_out
from zbpp.training.options import HF, Train
from zbpp.training.resume import check_saving
from zbpp.training.user_model import UserModel
from zbpp.tuning.measure import SAFE_MODE

__all__ = [
    "build_pipeline",
    "check",
    "costs_of",
    "estimate_layers",
    "layers_of",
    "measures_first",
    "model_of",
    "plan_of",
    "random_batch",
    "run_split",
    "sleeping_layers",
    "split_layers",
]

_STAGES, _MICROBATCHES = 2, 8
_BETAS = (0.9, 0.95)  # of AdamW, as usual for language models
_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Compute dtypes by the names that ``--dtype`` has for them."""


def model_of(options: Train) -> TextModel:
    """The model that is trained; its weights are not made."""
    if options.model is not None:
        path = options.model.removeprefix(HF)
        if path == options.model:
            raise RequestError(
                f"--model {path}: zbpp train takes hf:PATH, a config.json of "
                "transformers or the folder of a checkpoint; another model is trained "
                "by a script, with zbpp.Pipeline"
            )
        return read_causal_lm(path, seq=options.seq, seed=options.seed)
    return LlamaConfig.of(options, seed=options.seed)


def _has_no_costs(options: Train) -> bool:
    return options.costs is options.layers is options.emulate is None


def measures_first(options: Train) -> bool:
    """True if the costs of the layers are measured before the first step.

    So they are for ``auto``, unless a file has them, or the limit is one in M_B.
    """
    limit = options.memory_limit
    in_bytes = limit is None or is_limit_in_bytes(limit)
    is_asked = is_auto(options.pipeline_schedule_mode)
    return is_asked and _has_no_costs(options) and in_bytes


def costs_of(options: Train) -> Costs:
    """Costs of chunks to plan for."""
    path = options.costs or options.emulate
    costs = Costs() if path is None else read_costs(path)
    if measures_first(options):  # in bytes, as what will be measured
        return replace(costs, memory_limit=options.memory_limit)
    return with_limit(costs, options.memory_limit, name="--memory_limit")


def layers_of(options: Train, n_layers: int) -> LayerCosts | None:
    """Costs per layer to plan for; None: there are none.

    Args:
        options: of the run.
        n_layers: layers of the model, if the run is not emulated.
    """
    layers = options.costs_of_layers()
    if layers is None:
        sleeping = sleeping_layers(options)
        return sleeping and with_limit(
            sleeping, options.memory_limit, name="--memory_limit"
        )
    if options.emulate is None and layers.n_layers != n_layers:
        raise RequestError(
            f"{options.layers}: it has costs of {layers.n_layers} layers, but the "
            f"model has {n_layers} (--n_blocks, embedding and head); profile this "
            "model"
        )
    return layers


def sleeping_layers(options: Train) -> LayerCosts | None:
    """Layers that sleep in place of a model; None: chunks do, or nothing does."""
    if options.emulate is None or not is_layers_file(options.emulate):
        return None
    return read_layers(options.emulate)


def plan_of(options: Train) -> Plan:
    """Plan the mode, or read the schedule file; with costs per layer also the split.

    Where `measures_first`, it is the one that is measured under.
    """
    mode = options.pipeline_schedule_mode
    n_stages, n_microbatches = options.stages, options.microbatches
    if not is_file(mode):
        n_stages = n_stages or _STAGES
        n_microbatches = n_microbatches or _MICROBATCHES
    model = model_of(options)
    layers = layers_of(options, model.n_layers)
    request = PlanRequest(
        schedule=mode,
        n_stages=n_stages,
        n_microbatches=n_microbatches,
        costs=layers,
        split=options.asked_split,
        recompute=options.asked_recompute,
        effort=options.effort,
    )
    if layers is None:
        emulated = options.emulate is not None
        split = None if emulated else partial(_placed_split, options, model)
        request = replace(request, costs=costs_of(options), split=split)
    if measures_first(options):
        request = replace(request, schedule=SAFE_MODE, costs=None, recompute=None)
    return replace(make_plan(request), has_costs=not _has_no_costs(options))


def run_split(options: Train, schedule: Schedule, model: TextModel) -> tuple[int, ...]:
    """Layers of each chunk: those asked for, or the schedule's, or equal blocks."""
    asked_alone = options.split is not None and options.layers is None
    if schedule.split is None or asked_alone:
        return _placed_split(options, model, schedule.placement)
    return split_of(schedule, None, model.n_layers)  # planned with it


def _placed_split(
    options: Train, model: TextModel, placement: Placement
) -> tuple[int, ...]:
    """Layers of each chunk of a placement, where no costs of layers are given."""
    asked, n_layers = options.asked_split, model.n_layers
    if asked is None:
        return tuple(split_layers(model, placement.n_chunks))
    counts = split_on(asked, n_layers, placement)
    return tuple(map(len, partition_layers(n_layers, placement.n_chunks, counts)))


def split_layers(model: TextModel, n_chunks: int) -> list[int]:
    """Layers of each chunk: even numbers of blocks, then embedding and head.

    Embedding and head do far less work than a block, so they come on top of the
    first and the last chunk's share, unless there are too few blocks for that.

    >>> split_layers(LlamaConfig(n_blocks=8), 4)
    [3, 2, 2, 3]
    """
    if model.n_blocks < n_chunks:
        return [len(layers) for layers in partition_layers(model.n_layers, n_chunks)]
    counts = [len(blocks) for blocks in partition_layers(model.n_blocks, n_chunks)]
    counts[0] += 1
    counts[-1] += 1
    return counts


def check(options: Train, plan: Plan) -> None:
    """Find before any process is started what would stop the run."""
    model = model_of(options)
    run_split(options, plan.schedule, model)
    _check_tensor_parallel(options, model)
    device = asked_device(options.device)
    if options.dtype == "fp16":
        _check_half(device)
    check_saving(options)
    load_corpus(options.data, seq=options.seq)
    if options.costs_out is not None and plan.schedule.runs(PassKind.BW):
        raise RequestError(f"--costs_out: {not_told_apart(plan.schedule.name)}")


def _check_tensor_parallel(options: Train, model: TextModel) -> None:
    """Refuse blocks that cannot be dealt out."""
    n = options.tensor_parallel
    if n == 1:
        return
    if not isinstance(model, LlamaConfig):
        raise RequestError(
            "--tensor_parallel is for the Llama that zbpp train makes; deal another "
            "model out in a script, by parallelize_module on mesh['tp']"
        )
    for name, size in (("n_heads", model.n_heads), ("hidden", model.hidden)):
        if size % n:
            raise RequestError(
                f"--tensor_parallel is {n}, which does not divide --{name} {size}"
            )


def _check_half(device: torch.device) -> None:
    try:
        half = torch.zeros(2, 2, dtype=torch.float16, device=device)
        torch.nn.functional.layer_norm(half @ half, (2,))
    except RuntimeError as error:
        raise RequestError(
            f"--dtype fp16: {device} does not compute in it ({error}); use bf16 or fp32"
        ) from error


def build_pipeline(
    options: Train, plan: Plan, loaded: UserModel | None = None
) -> Pipeline:
    """Make the pipeline of a run.

    Args:
        options: of the run.
        plan: to run; where `measures_first`, only its sizes count.
        loaded: a user's model, under the schedule of the plan; None: that of the
            options.
    """
    schedule = plan.schedule
    made_of = _given(options, loaded)
    model = layered_of(made_of["model"], made_of.get("n_layers"))
    processes: DataParallel | None = None
    mesh = _mesh_of(options, schedule.n_stages)
    if mesh is not None:
        if options.tensor_parallel > 1:
            model = replace(model, build=dealt_out(model.build, mesh["tp"]))
        processes = DataParallel(
            mesh=mesh,
            shard=options.shard,
            alternating_buffers=options.alternating_buffers,
        )
    made_as: dict[str, Any] = {
        "loss_fn": made_of.get("loss_fn") or (loaded and _own_loss),
        "optimizer": partial(_make_optimizer, options),
        "mesh": processes,
        "device": asked_device(options.device),
        "numerics": Numerics(
            autocast=_AUTOCAST[options.dtype],
            exact_sums=options.exact_sums,
            seed=made_of.get("seed"),
        ),
        "step": StepPolicy(
            post_validation=options.enable_optimizer_post_validation,
            max_consecutive_skips=options.max_consecutive_skips,
            loss_scale=LossScaler() if options.dtype == "fp16" else None,
        ),
        "execution": Execution(
            compile="blocks" if options.compiles else False,
            watch=loaded is None and measures_first(options),
            timeout_s=options.timeout_s,
        ),
    }
    if loaded is not None:
        return Pipeline(model, schedule, **made_as)
    if measures_first(options):
        plan = plan_model(
            model,
            "auto",
            n_microbatches=schedule.n_microbatches,
            n_stages=schedule.n_stages,
            memory_limit=options.memory_limit,
            example=random_batch(options, schedule.n_microbatches),
            split=options.asked_split,
            recompute=options.asked_recompute,
            **made_as,
        )
    else:
        split = run_split(options, schedule, model_of(options))
        plan = replace(plan, schedule=replace(schedule, split=split), split=split)
    return Pipeline(model, plan, clip_grad_norm=options.clip_grad_norm, **made_as)


def _given(options: Train, loaded: UserModel | None) -> dict[str, Any]:
    """Return what `zbpp.Pipeline` is given of the model."""
    if loaded is None:
        return model_of(options).given()
    kwargs = {"model": loaded.model, "loss_fn": loaded.loss_fn}
    return {**kwargs, "n_layers": loaded.n_layers} if callable(loaded.model) else kwargs


def _own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a model whose last layer has put it out."""
    return outputs


def _mesh_of(options: Train, n_stages: int) -> DeviceMesh | None:
    """The mesh of replicas and tensor parallelism; None: there are none."""
    if options.n_peers == 1:
        return None
    return make_mesh(
        stages=n_stages,
        data_parallel=options.data_parallel,
        tensor_parallel=options.tensor_parallel,
        device=asked_device(options.device),
        timeout_s=options.timeout_s,
    )


def _make_optimizer(options: Train, parameters: list[nn.Parameter]) -> AdamW:
    """Make the optimizer of a stage.

    Its kernel takes no DTensors beside plain tensors: they get a group of their own.
    """
    kinds: dict[type, list[nn.Parameter]] = {}
    for p in parameters:
        kinds.setdefault(type(p), []).append(p)
    return AdamW(
        [{"params": alike} for alike in kinds.values()],
        lr=options.lr,
        betas=_BETAS,
        weight_decay=options.weight_decay,
        fused=True,
    )


def random_batch(options: Train, n_microbatches: int) -> tuple[Any, Any]:
    """Inputs and targets of the sizes of a step, for the model of the options."""
    generator = torch.Generator().manual_seed(options.seed)
    shape = (n_microbatches * options.microbatch_size, options.seq)
    tokens = torch.randint(256, shape, generator=generator)
    return model_of(options).batch(tokens, tokens)


def estimate_layers(options: Train, loaded: UserModel | None = None) -> LayerCosts:
    """Estimate what the layers of a model hold, on fake tensors: some seconds.

    Args:
        options: of the run.
        loaded: the model; None: that of the options.
    """
    made_of = _given(options, loaded)
    batch = random_batch(options, 1)
    if loaded is not None:
        batch = (loaded.inputs, loaded.targets)
    return layer_memory(
        made_of["model"],
        batch,
        made_of.get("loss_fn"),
        n_layers=made_of.get("n_layers"),
        optimizer=partial(_make_optimizer, options),
        autocast=_AUTOCAST[options.dtype],
        exact_sums=options.exact_sums,
        compile="blocks" if options.compiles else False,
    )
