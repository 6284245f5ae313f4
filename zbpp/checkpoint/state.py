"""The whole state of a run: what is saved, and how it is read, checked and loaded.

    {"step": 12, "model": {...}, "optimizer": {...}, "schedulers": {...},
     "run": {"scaler": ..., "history": ...}, "aliases": {...}, "extra": {...}}

Loading has three parts, so that a state that does not fit changes nothing, on whatever
process: `check_state` everywhere, `refuse_misfits` with what all have found, and only
then `load_state`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zbpp.checkpoint.folder import Gather
from zbpp.checkpoint.manifest import CheckpointError, Manifest
from zbpp.checkpoint.model import (
    Checked,
    LocalModel,
    State,
    check_model,
    load_model,
)
from zbpp.checkpoint.optimizers import (
    check_optimizers,
    check_schedulers,
    load_optimizers,
    optimizer_state,
    scheduler_state,
)
from zbpp.checkpoint.saving import Put
from zbpp.checkpoint.tensors import TensorReader, whole
from zbpp.checkpoint.values import decode, encode, misfit
from zbpp.core import RequestError

__all__ = [
    "Checked",
    "State",
    "check_state",
    "load_state",
    "names_in",
    "read_state",
    "refuse_misfits",
    "state_of",
    "take_snapshot",
]

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
        "schedulers": scheduler_state(local),
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
    saves: bool = True,
    trainable_only: bool = False,
) -> Manifest:
    """Collect what this process saves: each tensor once among all, and whole.

    The manifest that it gives has no files yet.

    Args:
        local: whose state it is.
        about: the schedule, for people who read the manifest.
        run: what the runtime needs to go on.
        put: takes the tensors, one after the other: a sharded one is gathered for it,
            and its memory is free before the next one is.
        step: steps done.
        extra: of the script.
        saves: false on all but one of the processes that hold shards of the same
            tensors; they must call, too.
        trainable_only: leave out frozen parameters and all buffers.

    Raises:
        RequestError: a part of the state is nothing that a checkpoint can hold.
    """

    def gather(name: str, tensor: Tensor) -> None:
        gathered = whole(tensor)
        if gathered.layout is not torch.strided:
            layout = str(gathered.layout).removeprefix("torch.")
            raise RequestError(
                f"{name} is a tensor of layout {layout}, which a checkpoint cannot "
                "hold; give a dense one (sparse gradients make a momentum of SGD "
                "sparse: leave the momentum out there)"
            )
        if saves:
            put(name, gathered)

    extra_states: dict[str, Any] = {}
    for slot in local.slots:
        name = f"model/{slot.saved_as}"
        if not slot.saves or (trainable_only and not slot.is_trainable):
            continue
        if isinstance(slot.value, Tensor):
            gather(name, slot.value)
        else:
            extra_states[slot.saved_as] = encode(slot.value, name, gather)
    optimizers = optimizer_state(local, saved=True, trainable_only=trainable_only)
    values: dict[str, Any] = {
        "extra_states": extra_states,
        "optimizer": {
            name: encode(entries, f"optimizer/{name}", gather)
            for name, entries in optimizers.items()
        },
        "schedulers": {
            name: encode(entry, f"schedulers/{name}", gather)
            for name, entry in scheduler_state(local).items()
        },
    }
    if not saves:
        values = {}
    values["run"] = encode(dict(run), "run", gather)
    values["extra"] = encode(dict(extra), "extra", gather)
    return Manifest(
        step,
        {**about, "trainable_only": trainable_only},
        aliases=local.aliases() if saves else {},
        values=values,
    )


def read_state(
    folder: Path,
    manifest: Manifest,
    local: LocalModel | None,
    *,
    model_only: bool = False,
) -> State:
    """Read what a process needs of a checkpoint.

    Args:
        folder: of the checkpoint.
        manifest: of it, verified.
        local: what is to be loaded; None: read everything.
        model_only: leave out all but parameters and buffers.

    Raises:
        CheckpointError: a file cannot be read.
    """
    read, values = TensorReader(folder, manifest.tensors).read, manifest.values
    names = names_in(manifest)
    if local is not None:
        needed = set[str]().union(*(s.names_in(manifest.aliases) for s in local.slots))
        names = {part: held & needed for part, held in names.items()}
    state: State = {
        "step": manifest.step,
        "aliases": dict(manifest.aliases),
        "trainable_only": bool(manifest.run.get("trainable_only")),
    }
    try:
        extra_states = values.get("extra_states", {})
        state["model"] = {
            name: decode(extra_states[name], read)
            if name in extra_states
            else read(f"model/{name}")
            for name in sorted(names["model"])
        }
        if not model_only:
            state["optimizer"] = {
                name: decode(values["optimizer"][name], read)
                for name in sorted(names["optimizer"])
            }
            state["schedulers"] = {
                name: decode(entry, read)
                for name, entry in values.get("schedulers", {}).items()
            }
            for name in ("run", "extra"):
                state[name] = decode(values.get(name), read)
            _check_entries(state)
    except _NOT_A_STATE as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    return state


_NOT_A_STATE = (
    ArithmeticError,
    LookupError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)
"""The errors of reading values that are not what they are taken for."""


def _check_entries(state: State) -> None:
    """Refuse values that are none of what `take_snapshot` has saved.

    Raises:
        RequestError: names the first one.
    """
    expected: dict[str, Any] = {"run": {}, "extra": {}}
    texts = [misfit({name: state[name] for name in expected}, expected, "the state")]
    entry = {"kind": "", "state": {}, "options": {}}
    for name, entries in state["optimizer"].items():
        where = f"the optimizer's state of {name}"
        texts.append(misfit(entries, [], where))
        texts += [misfit(saved, entry, where) for saved in entries]
    for text in texts:
        if text is not None:
            raise RequestError(text)


def names_in(manifest: Manifest) -> dict[str, set[str]]:
    """Names in a checkpoint, by part: model and optimizer."""
    model = {
        key.removeprefix("model/")
        for key in manifest.tensors
        if key.startswith("model/")
    }
    return {
        "model": model | set(manifest.values.get("extra_states", {})),
        "optimizer": set(manifest.values.get("optimizer", {})),
    }


def check_state(
    local: LocalModel, state: State, *, model_only: bool = False
) -> Checked:
    """Compare a state with what one process holds; nothing is changed.

    Raises:
        RequestError: it is no state.
    """
    if not isinstance(state.get("model"), Mapping):
        raise RequestError(
            "this is no state of a pipeline: it has no 'model'; give what "
            "pipeline.state_dict() returns"
        )
    checked = Checked(experts=local.experts)
    check_model(local, state, checked)
    if not model_only:
        check_optimizers(local, state, checked)
        check_schedulers(local, state, checked)
        if type(state.get("step")) is not int:
            checked.wrong.append("the number of steps (step) is missing")
    return checked


def refuse_misfits(
    checked: Checked,
    names: Mapping[str, Iterable[str]],
    aliases: Mapping[str, str],
    gather: Gather,
) -> None:
    """Refuse a state that does not fit on any process; all must call.

    Args:
        checked: the finding of this process.
        names: of parameters in its state, by part: model and optimizer. Those of a part
            that is not loaded do not count.
        aliases: names in its state that others stand for.
        gather: gives every process the values of all.

    Raises:
        RequestError: names what is missing, unknown or different, on all alike.
    """
    held_here = {part: set(names.get(part, ())) for part in checked.used}
    answers = gather((checked.wrong, checked.used, held_here, dict(aliases)))
    first_names = {
        alias: name for *_, table in answers for alias, name in table.items()
    }
    wrong = [text for texts, *_ in answers for text in texts]
    for part in ("model", "optimizer"):
        held = {name for _, _, names, _ in answers for name in names.get(part, ())}
        used = {name for _, names, _, _ in answers for name in names.get(part, ())}
        used = {first_names.get(name, name) for name in used}
        what = "" if part == "model" else "the optimizer's state of "
        wrong += [
            f"{what}{name} is unknown here"
            for name in sorted(held)
            if first_names.get(name, name) not in used
        ]
    if wrong:
        shown = "; ".join(wrong[:_MAX_SHOWN])
        n_more = len(wrong) - _MAX_SHOWN
        more = f"; and {n_more} more" if n_more > 0 else ""
        raise RequestError(
            f"the state does not fit, and nothing was changed: {shown}{more}"
        )


def load_state(checked: Checked) -> None:
    """Load a state that was found to fit."""
    load_model(checked)
    load_optimizers(checked)
