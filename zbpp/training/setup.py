"""From the options of a run to what it is made of; the same in every process."""

from dataclasses import replace
from functools import partial

import torch

from zbpp.core import (
    Costs,
    PassKind,
    RequestError,
    read_costs,
)
from zbpp.core.costs.units import is_limit_in_bytes, with_limit
from zbpp.core.measured import not_told_apart
from zbpp.models.configs.text_model import TextModel
from zbpp.planning import Plan, PlanRequest, is_auto, is_file, make_plan
from zbpp.runtime.support.devices import asked_device
from zbpp.training.data import load_corpus
from zbpp.training.llama import LlamaConfig
from zbpp.training.options import HF, Train
from zbpp.training.resume import check_saving
from zbpp.training.splits import (
    asked_recompute,
    asked_split,
    layers_of,
    placed_split,
    run_split,
)
from zbpp.tuning.measure import SAFE_MODE

__all__ = [
    "check",
    "costs_of",
    "device_of",
    "measures_first",
    "model_of",
    "plan_of",
]

_STAGES = 2
_MICROBATCHES = 8


def model_of(options: Train) -> TextModel:
    """The model that is trained; its weights are not made.

    Raises:
        RequestError: there is no such model, or none of these sizes.
    """
    if options.model is not None:
        from zbpp.models.configs.byte_model import read_causal_lm

        path = options.model.removeprefix(HF)
        if path == options.model:
            raise RequestError(
                f"--model {path}: zbpp train takes hf:PATH, a config.json of "
                "transformers or the folder of a checkpoint; another model is trained "
                "by a script, with zbpp.Pipeline"
            )
        return read_causal_lm(path, seq=options.seq, seed=options.seed)
    return LlamaConfig(
        dim=options.dim,
        n_blocks=options.n_blocks,
        n_heads=options.n_heads,
        hidden=options.hidden,
        seq=options.seq,
        seed=options.seed,
    )


def costs_of(options: Train) -> Costs:
    """Costs of chunks to plan for.

    Raises:
        RequestError: the file of costs is not valid.
    """
    path = options.costs or options.emulate
    costs = Costs() if path is None else read_costs(path)
    if measures_first(options):  # in bytes, as what will be measured
        return replace(costs, limit=options.memory_limit)
    return with_limit(costs, options.memory_limit, name="--memory_limit")


def plan_of(options: Train) -> Plan:
    """Plan the mode, or read the schedule file; with costs per layer also the split.

    Where `measures_first`, it is the one that is measured under.

    Raises:
        RequestError: there is no such schedule.
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
        split=asked_split(options),
        recompute=asked_recompute(options),
        effort=options.effort,
    )
    if layers is None:
        emulated = options.emulate is not None
        split = None if emulated else partial(placed_split, options, model)
        request = replace(request, costs=costs_of(options), split=split)
    if measures_first(options):
        request = replace(request, schedule=SAFE_MODE, costs=None, recompute=None)
    given = (layers, options.costs, options.emulate)
    return replace(make_plan(request), has_costs=given != (None,) * 3)


def measures_first(options: Train) -> bool:
    """True if the costs of the layers are measured before the first step.

    So they are for ``auto``, unless a file has them, or the limit is one in M_B.
    """
    given = (options.costs, options.layers, options.emulate)
    limit = options.memory_limit
    in_bytes = limit is None or is_limit_in_bytes(limit)
    return is_auto(options.pipeline_schedule_mode) and given == (None,) * 3 and in_bytes


def device_of(options: Train) -> torch.device | None:
    """The device of this process; None: its own GPU if all have one, else the CPU.

    Raises:
        RequestError: there is no GPU, or torch is built without CUDA.
    """
    return None if options.device == "auto" else asked_device(options.device)


def _check_dtype(options: Train) -> None:
    device = asked_device(options.device)
    if options.dtype != "fp16":
        return
    try:
        half = torch.zeros(2, 2, dtype=torch.float16, device=device)
        torch.nn.functional.layer_norm(half @ half, (2,))
    except RuntimeError as error:
        raise RequestError(
            f"--dtype fp16: {device} does not compute in it ({error}); use bf16 or fp32"
        ) from error


def _check_tensor_parallel(options: Train, model: object) -> None:
    """Check that the blocks can be dealt out.

    Raises:
        RequestError: they cannot.
    """
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


def check(options: Train, plan: Plan) -> None:
    """Find before any process is started what would stop the run.

    Raises:
        RequestError: the model, the text or a path cannot be had.
    """
    model = model_of(options)
    run_split(options, plan.schedule, model)
    _check_tensor_parallel(options, model)
    _check_dtype(options)
    check_saving(options)
    load_corpus(options.data, seq=options.seq)
    if options.costs_out is not None and plan.schedule.runs(PassKind.BW):
        raise RequestError(f"--costs_out: {not_told_apart(plan.schedule.name)}")
