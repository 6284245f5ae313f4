"""The whole state of a run: what is saved, and how it is read, checked and loaded.

    {"step": 12, "model": {...}, "optimizer": {...}, "schedulers": {...},
     "run": {"scaler": ..., ...}, "aliases": {...}, "extra": {...}}

Loading has three parts, so that a state that does not fit changes nothing, on whatever
process: `check_state` everywhere, `refuse_misfits` with what all have found, and only
then `load_state`. Of a checkpoint this part alone reads parameters, buffers and
moments, straight to where they belong; until then they are on the meta device.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zbpp.checkpoint.folder import Gather
from zbpp.checkpoint.format import (
    CheckpointError,
    Manifest,
    SavedTensors,
    decode,
    encode,
    shard_of,
)
from zbpp.checkpoint.model import Fit, LocalModel, Pairs, State, check_model, load_model
from zbpp.checkpoint.optimizers import (
    check_optimizers,
    check_schedulers,
    load_optimizers,
    load_schedulers,
    merge_schedulers,
    optimizer_state,
    scheduler_states,
)
from zbpp.checkpoint.save import Put
from zbpp.core import RequestError
from zbpp.runtime.comm.stage_group import StageGroup
from zbpp.runtime.support.sharded import is_sharded, layout_of, local_part, whole

__all__ = [
    "Copy",
    "State",
    "check_state",
    "copy_tensors",
    "load_state",
    "read_state",
    "refuse_misfits",
    "state_of",
    "take_snapshot",
]

Copy = Callable[[Pairs], None]
"""Gives tensors the numbers of those in a state."""

_MAX_SHOWN = 8  # misfits in an error


def state_of(local: LocalModel, *, step: int, run: Mapping[str, Any]) -> State:
    """The state of one process; its tensors are those of the model, not copies."""
    return {
        "step": step,
        "model": {
            slot.name: x.detach() if isinstance(x := slot.value, Tensor) else x
            for slot in local.slots
        },
        "optimizer": optimizer_state(local),
        "schedulers": merge_schedulers(scheduler_states(local)),
        "run": dict(run),
        "aliases": local.aliases(),
    }


def take_snapshot(
    local: LocalModel,
    about: Mapping[str, Any],
    run: Mapping[str, Any],
    put: Put,
    *,
    step: int,
    extra: Mapping[str, Any],
    peers: StageGroup,
    rank: int,
    trainable_only: bool = False,
) -> Manifest:
    """Collect what this process saves: of equal shards one process saves one.

    Args:
        local: whose state it is.
        about: the schedule, for people who read the manifest.
        run: what the runtime needs to go on.
        put: takes the shards, one after the other.
        step: steps done.
        extra: of the script; rank 0 saves it.
        peers: processes of the same stage; the first saves what is not sharded.
        rank: of this process.
        trainable_only: leave out frozen parameters and all buffers.

    Raises:
        RequestError: a part of the state is nothing that a checkpoint can hold.
    """

    def take(name: str, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            raise RequestError(
                f"{name} is a tensor of layout {layout}, which a checkpoint cannot "
                "hold; give a dense one (sparse gradients make a momentum of SGD "
                "sparse: leave the momentum out there)"
            )
        if _saves(peers, tensor, name):
            shard = shard_of(tensor)
            if shard.numbers.numel() or not tensor.numel():
                put(name, shard)

    extra_states: dict[str, Any] = {}
    for slot in local.slots:
        if not slot.saves or (trainable_only and not slot.is_trainable):
            continue
        if isinstance(slot.value, Tensor):
            take(f"model/{slot.saved_as}", slot.value)
        else:
            where = f"extra_states/{slot.saved_as}"
            extra_states[slot.saved_as] = encode(slot.value, where, take)
    entries = optimizer_state(local, saved=True, trainable_only=trainable_only)
    schedulers = merge_schedulers(scheduler_states(local))
    values: dict[str, Any] = {
        "extra_states": extra_states,
        "optimizer": {
            name: [
                {
                    "kind": entry["kind"],
                    "state": encode(entry["state"], f"optimizer/{name}/{i}", take),
                    "options": encode(entry["options"], f"options/{name}/{i}", take),
                }
                for i, entry in enumerate(of_parameter)
            ]
            for name, of_parameter in entries.items()
        },
        "schedulers": {
            name: encode(state, f"schedulers/{name}", take)
            for name, state in schedulers.items()
        },
    }
    is_first = peers.owns(())
    values = values if is_first else {}
    if rank == 0:
        values["run"] = encode(dict(run), "run", take)
        values["extra"] = encode(dict(extra), "extra", take)
    return Manifest(
        step,
        {**about, "trainable_only": trainable_only},
        aliases=local.aliases() if is_first else {},
        values=values,
    )


def _saves(peers: StageGroup, tensor: Tensor, name: str) -> bool:
    """True on one of the processes that have the same shard of a tensor.

    Raises:
        RequestError: no process of the pipeline has the other shards.
    """
    part = local_part(tensor)
    dims = zip(part.names, part.dims, strict=True)
    dim_names = [dim_name for dim_name, dim in dims if part.mesh.size(dim) > 1]
    if not peers.has_dims(dim_names):
        raise RequestError(
            f"{name} is sharded along {dim_names} of a mesh that is not the "
            "pipeline's, so its other parts are in no process of it; give that mesh, "
            "with a dimension of stages, as mesh="
        )
    return peers.owns(dim_names)


def read_state(
    folder: Path, manifest: Manifest, *, model_only: bool = False
) -> tuple[State, Copy]:
    """Read a checkpoint, but for its parameters, buffers and moments.

    Returns:
        The state, in which they are on the meta device, and what reads them.

    Raises:
        CheckpointError: it is no state, or a file cannot be read.
    """
    tensors, pairs = SavedTensors(folder), Pairs()

    def now(name: str) -> Tensor:
        like = tensors.like[name]
        pairs.append((like, torch.empty_like(like, device="cpu")))
        return pairs[-1][1]

    def later(value: Any) -> Any:
        is_tensor = isinstance(value, dict) and value.keys() == {"tensor"}
        return tensors.like[value["tensor"]] if is_tensor else decode(value, now)

    def entry_of(entry: Mapping[str, Any]) -> dict[str, Any]:
        rows = entry["state"]["dict"]
        return {
            "kind": entry["kind"],
            "state": {decode(key, now): later(value) for key, value in rows},
            "options": decode(entry["options"], now),
        }

    def table(part: str) -> dict[str, Any]:
        return {name: decode(x, now) for name, x in manifest.values[part].items()}

    prefix, values = "model/", manifest.values
    model = {
        k.removeprefix(prefix): x
        for k, x in tensors.like.items()
        if k.startswith(prefix)
    }
    try:
        state: State = {
            "step": manifest.step,
            "aliases": manifest.aliases,
            "trainable_only": manifest.run["trainable_only"],
            "extra": decode(values["extra"], now),
            "model": model | table("extra_states"),
        }
        if not model_only:
            state["run"] = decode(values["run"], now)
            state["schedulers"] = table("schedulers")
            state["optimizer"] = {
                name: [entry_of(entry) for entry in of_parameter]
                for name, of_parameter in values["optimizer"].items()
            }
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(f"{folder} is no state: {error!r}") from error
    tensors.read(pairs)
    return state, tensors.read


def check_state(local: LocalModel, state: State, *, model_only: bool = False) -> Fit:
    """Compare a state with what one process has; nothing is changed."""
    fit = Fit()
    if not isinstance(state.get("model"), Mapping):
        fit.wrong.append(
            "this is no state of a pipeline: it has no 'model'; give what "
            "pipeline.state_dict() returns"
        )
        return fit
    check_model(local, state, fit)
    if not model_only:
        check_optimizers(local, state, fit)
        check_schedulers(local, state, fit)
        if type(state.get("step")) is not int:
            fit.wrong.append("the number of steps (step) is missing")
    return fit


def refuse_misfits(
    fit: Fit, state: State, gather: Gather, *, counts: bool = True
) -> None:
    """Refuse a state that does not fit on any process; all must call.

    Args:
        fit: the finding of this process.
        state: of any layers. Names in a part that is not loaded do not count.
        gather: gives every process the values of all.
        counts: this process sends the names that it needs; replicas need the same.

    Raises:
        RequestError: names what is missing, unknown or different, on all alike.
    """
    answers = gather((fit.wrong, fit.used if counts else {}))
    aliases = state.get("aliases", {})
    unknown: list[str] = []
    for part in fit.used:
        used = chain.from_iterable(table.get(part, ()) for _, table in answers)
        known = {aliases.get(name, name) for name in used}
        what = "" if part == "model" else "the optimizer's state of "
        unknown += [
            f"{what}{name} is unknown here"
            for name in sorted(state.get(part, ()))
            if aliases.get(name, name) not in known
        ]
    wrong = chain.from_iterable(texts for texts, _ in answers)
    texts = [*dict.fromkeys([*wrong, *chain.from_iterable(gather(unknown))])]
    if texts:
        n_more = len(texts) - _MAX_SHOWN
        more = f"; and {n_more} more" if n_more > 0 else ""
        raise RequestError(
            "the state does not fit, and nothing was changed: "
            f"{'; '.join(texts[:_MAX_SHOWN])}{more}"
        )


def load_state(local: LocalModel, fit: Fit, copy: Copy) -> None:
    """Load a state that was found to fit."""
    copy([*load_model(fit), *load_optimizers(local, fit)])
    load_schedulers(fit)


@torch.no_grad()
def copy_tensors(pairs: Pairs) -> None:
    """Copy tensors, whole or sharded in any way, into those to which they belong."""
    for value, target in pairs:
        shard = shard_of(target)
        if is_sharded(value) and layout_of(value) == layout_of(target):
            shard.numbers.copy_(shard_of(value).numbers)
        else:
            shard.numbers.copy_(shard.of(whole(value)))
