"""The whole state of a run: what is saved, and how it is read, checked and loaded.

    {"step": 12, "model": {...}, "optimizer": {...}, "schedulers": [...],
     "run": {"scaler": ..., "history": ...}, "aliases": {...}, "extra": {...}}

Loading has three parts, so that a state that does not fit changes nothing, on whatever
process: `check_state` everywhere, `refuse_misfits` with what all have found, and only
then `load_state`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from zbpp.checkpoint.manifest import CheckpointError, Manifest
from zbpp.checkpoint.optimizer_state import (
    check_optimizers,
    load_optimizers,
    optimizer_state,
)
from zbpp.checkpoint.owned import Owned, check_model, load_model, model_state
from zbpp.checkpoint.saving import Snapshot
from zbpp.checkpoint.scheduler_state import fit_schedulers, scheduler_state
from zbpp.checkpoint.shards import whole
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

State = dict[str, Any]
_MODEL, _OPTIMIZER = "model", "optimizer"
_TRAINABLE_ONLY = "trainable_only"
_SHOWN = 8  # misfits that an error tells


def state_of(owned: Owned, *, step: int, run: Mapping[str, Any]) -> State:
    """The state of one process; its tensors are those of the model, not copies."""
    return {
        "step": step,
        _MODEL: model_state(owned),
        _OPTIMIZER: optimizer_state(owned),
        "schedulers": scheduler_state(owned),
        "run": dict(run),
        "aliases": owned.aliases(),
    }


def take_snapshot(
    owned: Owned,
    about: Mapping[str, Any],
    run: Mapping[str, Any],
    *,
    step: int,
    extra: Mapping[str, Any],
    saves: bool = True,
    trainable_only: bool = False,
) -> Snapshot:
    """Collect what this process saves: each tensor once among all, and whole.

    Those that hold parts of the same tensors must all call; one of them ``saves``.
    ``trainable_only`` leaves out frozen parameters and all buffers.

    Raises:
        RequestError: a part of the state is nothing that a checkpoint can hold.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {"extra_states": {}}

    def put(name: str, tensor: Tensor) -> None:
        gathered = whole(tensor)
        if saves:
            tensors[name] = gathered

    for slot in owned.slots:
        where = f"{_MODEL}/{slot.name}"
        if not slot.saves or (trainable_only and not slot.is_trainable):
            continue
        if isinstance(slot.value, Tensor):
            put(where, slot.value.detach())
        else:
            values["extra_states"][slot.name] = encode(slot.value, where, put)
    values[_OPTIMIZER] = {
        name: encode(entries, f"{_OPTIMIZER}/{name}", put)
        for name, entries in optimizer_state(
            owned, saved=True, trainable_only=trainable_only
        ).items()
    }
    values["schedulers"] = [
        encode(one, f"schedulers/{'+'.join(one['groups'][0][:1])}/{one['place']}", put)
        for one in scheduler_state(owned)
    ]
    if not saves:
        values = {}
    values["run"] = encode(dict(run), "run", put)
    values["extra"] = encode(dict(extra), "extra", put)
    aliases = owned.aliases() if saves else {}
    about = {**about, _TRAINABLE_ONLY: trainable_only}
    return Snapshot(step, tensors, values, aliases, about)


def read_state(
    folder: Path, manifest: Manifest, owned: Owned | None, *, model_only: bool = False
) -> State:
    """Read what a process needs of a checkpoint.

    Args:
        folder: of the checkpoint.
        manifest: of it, verified.
        owned: what is to be loaded; None: read everything.
        model_only: leave out all but parameters and buffers.

    Raises:
        CheckpointError: a file cannot be read.
    """
    values, aliases = manifest.values, manifest.aliases
    held = {
        key.removeprefix(f"{_MODEL}/"): key
        for key in manifest.tensors
        if key.startswith(f"{_MODEL}/")
    }
    stepped = values.get(_OPTIMIZER, {})
    if owned is not None:
        wanted = {
            name
            for slot in owned.slots
            for name in (slot.name, slot.own, aliases.get(slot.own, slot.own))
        }
        held = {name: key for name, key in held.items() if name in wanted}
        stepped = {name: one for name, one in stepped.items() if name in wanted}
    rest: dict[str, Any] = {"extra_states": values.get("extra_states", {})}
    if not model_only:
        rest |= {_OPTIMIZER: stepped} | {
            name: values.get(name) for name in ("schedulers", "run", "extra")
        }
    from zbpp.checkpoint.storage import read_tensors

    keys = set(held.values())

    def note(key: str) -> Tensor:
        keys.add(key)
        return _NOTHING

    try:
        _decoded(rest, note)
        tensors = read_tensors(folder, manifest.tensors, keys)
        found = _decoded(rest, tensors.__getitem__)
        if not model_only:
            _check_entries(found)
    except (OSError, RequestError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    state: State = {
        "step": manifest.step,
        _MODEL: {name: tensors[key] for name, key in held.items()},
        "aliases": dict(aliases),
        _TRAINABLE_ONLY: bool(manifest.run.get(_TRAINABLE_ONLY)),
    }
    state[_MODEL] |= found.pop("extra_states")
    return state | found


_NOTHING = Tensor()


def _decoded(rest: Mapping[str, Any], get: Any) -> dict[str, Any]:
    """Tables of encoded values are plain JSON down to their entries."""
    found: dict[str, Any] = {}
    for name, value in rest.items():
        if name in (_OPTIMIZER, "extra_states"):
            found[name] = {key: decode(one, get) for key, one in value.items()}
        else:
            found[name] = decode(value, get)
    return found


def _check_entries(found: Mapping[str, Any]) -> None:
    """Refuse values that are none of what `optimizer_state` and others have saved.

    Raises:
        RequestError: names the first one.
    """
    one = {"kind": "", "state": {}, "options": {}}
    for name, entries in found[_OPTIMIZER].items():
        if not isinstance(entries, list):
            raise RequestError(f"the optimizer's state of {name} is no list")
        for entry in entries:
            _refuse(misfit(entry, one, f"the optimizer's state of {name}"))
    expected: dict[str, Any] = {"schedulers": [], "run": {}, "extra": {}}
    _refuse(misfit({n: found[n] for n in expected}, expected, "the state"))
    for number, scheduler in enumerate(found["schedulers"]):
        where = f"the state of scheduler {number}"
        _refuse(misfit(scheduler, {"groups": [], "place": 0, "state": {}}, where))
        groups = scheduler["groups"]
        if not all(isinstance(group, list) for group in groups) or not all(
            isinstance(name, str) for group in groups for name in group
        ):
            raise RequestError(f"{where} has groups that are no lists of names")


def _refuse(words: str | None) -> None:
    if words is not None:
        raise RequestError(words)


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


@dataclass
class Checked:
    """The finding of one process about a state."""

    used: dict[str, set[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    schedulers: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    def told(self) -> tuple[dict[str, set[str]], list[str]]:
        """As the other processes are told."""
        return self.used, self.wrong


def check_state(owned: Owned, state: State, *, model_only: bool = False) -> Checked:
    """Compare a state with what one process holds; nothing is changed.

    Raises:
        RequestError: it is no state.
    """
    aliases = state.get("aliases", {})
    if not isinstance(state.get(_MODEL), Mapping):
        raise RequestError(
            "this is no state of a pipeline: it has no 'model'; give what "
            "pipeline.state_dict() returns"
        )
    checked = Checked()
    trainable_only = bool(state.get(_TRAINABLE_ONLY))
    checked.used[_MODEL], checked.wrong = check_model(
        owned, state[_MODEL], aliases, trainable_only=trainable_only
    )
    if model_only:
        return checked
    entries = state.get(_OPTIMIZER, {})
    checked.used[_OPTIMIZER], wrong = check_optimizers(
        owned, entries, aliases, trainable_only=trainable_only
    )
    checked.schedulers, its = fit_schedulers(owned, state.get("schedulers", []))
    checked.wrong += wrong + its
    return checked


def refuse_misfits(
    told: Iterable[tuple[dict[str, set[str]], list[str]]],
    given: Mapping[str, Iterable[str]],
    aliases: Mapping[str, str],
) -> None:
    """Refuse a state that does not fit; the same on all processes.

    Args:
        told: what each process has found.
        given: names of parameters in the state, by part: model and optimizer.
        aliases: names in it that others stand for.

    Raises:
        RequestError: names what is missing, unknown or different.
    """
    told = list(told)
    wrong = [text for _, its in told for text in its]
    for part, names in given.items():
        used = {
            aliases.get(name, name) for uses, _ in told for name in uses.get(part, ())
        }
        what = "" if part == _MODEL else "the optimizer's state of "
        wrong += [
            f"{what}{name} is unknown here"
            for name in sorted(names)
            if aliases.get(name, name) not in used
        ]
    if wrong:
        shown = "; ".join(wrong[:_SHOWN])
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise RequestError(
            f"the state does not fit, and nothing was changed: {shown}{more}"
        )


def load_state(owned: Owned, state: State, checked: Checked) -> None:
    """Load a state that was found to fit."""
    aliases = state.get("aliases", {})
    load_model(owned, state[_MODEL], aliases)
    if _OPTIMIZER in checked.used:
        load_optimizers(owned, state.get(_OPTIMIZER, {}), aliases)
    for scheduler, its in checked.schedulers:
        scheduler.load_state_dict(its)
