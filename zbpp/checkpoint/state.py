"""The whole state of a run, and how it is saved, read, checked and loaded.

    {"step": 12, "model": {...}, "optimizer": {...}, "schedulers": {...},
     "residuals": {...}, "run": {"scaler": ..., ...}, "aliases": {...}, "extra": {...}}

Names are those of the model, so a state fits any schedule and any number of stages.

Every process compares the state with what it has, all refuse it if it fits one of them
not, and only then is anything changed. Parameters, buffers and moments of a checkpoint
are on the meta device until they are read straight to where they belong.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zbpp.averaging import Averager
from zbpp.checkpoint.folder import Gather, candidates, open_newest
from zbpp.checkpoint.format import (
    CheckpointError,
    Manifest,
    SavedTensors,
    Shard,
    decode,
    encode,
    shard_of,
)
from zbpp.checkpoint.local import (
    Copy,
    Loading,
    LocalModel,
    Pairs,
    Place,
    Slot,
    State,
    allocate,
    compare,
    local_state,
)
from zbpp.checkpoint.save import Saver
from zbpp.core import RequestError
from zbpp.runtime.comm.place import Place as Peers
from zbpp.runtime.driver.stages import LocalStages
from zbpp.runtime.support.sharded import layout_of, local_part, whole

_BY_NAME = ("model", "optimizer", "schedulers", "residuals")
"""The parts of a state that every stage has for its names."""

_MAX_SHOWN = 8  # misfits in an error
_log = logging.getLogger("zbpp")


def _snapshot(
    state: State, *, peers: Peers, rank: int
) -> tuple[Manifest, dict[str, Shard]]:
    """Encode a state, and find the shards that this process saves."""
    shards: dict[str, Shard] = {}

    def put(name: str, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            layout = str(tensor.layout).removeprefix("torch.")
            raise RequestError(
                f"{name} is a tensor of layout {layout}, which a checkpoint cannot "
                "store; give a dense one (sparse gradients make a momentum of SGD "
                "sparse: leave the momentum out there)"
            )
        if peers.owns(local_part(tensor).names):
            shard = shard_of(tensor)
            if shard.numbers.numel() or not tensor.numel():
                shards[name] = shard

    values: dict[str, Any] = {
        part: {
            name: encode(x, f"{part}/{name}", put) for name, x in state[part].items()
        }
        for part in _BY_NAME
    }
    is_first = peers.owns(())
    values = values if is_first else {}
    if rank == 0:
        values |= {part: encode(state[part], part, put) for part in ("run", "extra")}
    aliases = state["aliases"] if is_first else {}
    manifest = Manifest(state["step"], state["about"], aliases=aliases, values=values)
    return manifest, shards


def read_state(
    folder: Path, manifest: Manifest, *, model_only: bool = False
) -> tuple[State, Copy]:
    """Read a checkpoint, but for its parameters, buffers and moments.

    They are on the meta device in the state; the function returned fills them.
    """
    tensors, pairs = SavedTensors(folder), Pairs()

    def get(name: str) -> Tensor:
        like = tensors.like[name]
        is_read_later = name.startswith(("model/", "optimizer/", "residuals/"))
        return like if is_read_later else allocate(like, pairs)

    values = manifest.values
    state: State = {
        "step": manifest.step,
        "aliases": manifest.aliases,
        "trainable_only": manifest.run["trainable_only"],
    }
    for part in ("model",) if model_only else _BY_NAME:
        state[part] = {name: decode(x, get) for name, x in values[part].items()}
    for part in ("extra",) if model_only else ("extra", "run"):
        state[part] = decode(values[part], get)
    tensors.read(pairs)
    return state, tensors.read


def refuse_misfits(
    loading: Loading, state: State, gather: Gather, *, counts: bool = True
) -> None:
    """Refuse a state that does not fit on any process; all must call.

    Replicas need the same names, so only those of the first count.
    """
    answers = gather((loading.misfits, loading.used if counts else {}))
    aliases = state.get("aliases", {})
    unknown: list[str] = []
    for part in loading.used:
        used = chain.from_iterable(table.get(part, ()) for _, table in answers)
        known = {aliases.get(name, name) for name in used}
        what = "" if part == "model" else "the optimizer's state of "
        unknown += [
            f"{what}{name} is unknown here"
            for name in sorted(state.get(part, ()))
            if aliases.get(name, name) not in known
        ]
    misfits = chain.from_iterable(texts for texts, _ in answers)
    texts = [*dict.fromkeys([*misfits, *chain.from_iterable(gather(unknown))])]
    if texts:
        n_more = len(texts) - _MAX_SHOWN
        more = f"; and {n_more} more" if n_more > 0 else ""
        raise RequestError(
            "the state does not fit, and nothing was changed: "
            f"{'; '.join(texts[:_MAX_SHOWN])}{more}"
        )


@torch.no_grad()
def _copy_tensors(pairs: Pairs) -> None:
    """Copy tensors, whole or sharded in any way, into those to which they belong."""
    for value, target in pairs:
        if layout_of(value) == layout_of(target):
            target.copy_(value)
        else:
            shard = shard_of(target)
            shard.numbers.copy_(shard.of(whole(value)))


class Checkpoints:
    """Takes, loads and saves the state of the stages of this process.

    `zbpp.Pipeline` explains the arguments and errors of the methods.
    """

    def __init__(
        self,
        stages: LocalStages,
        own_name: Callable[[int, str], str],
        ties: Sequence[Sequence[Place]],
        *,
        rank: int,
    ) -> None:
        self._stages, self._own_name, self._ties = stages, own_name, ties
        self._rank, self._gather = rank, stages.transport.gather
        self._saver = Saver(rank, self._gather)
        self.averager: Averager | None = None
        """Whose outer state is saved and loaded, too."""
        self._schedulers: tuple[Any, ...] = ()
        self._has_warned = False

    def attach(self, schedulers: tuple[Any, ...]) -> None:
        """Save and load the state of LR schedulers, too."""
        optimizers = {id(optimizer) for optimizer in self._stages.optimizers}
        for scheduler in schedulers:
            if id(getattr(scheduler, "optimizer", None)) not in optimizers:
                raise RequestError(
                    f"the {type(scheduler).__name__} is not of an optimizer of this "
                    "pipeline; make one for each of pipeline.optimizers"
                )
        scheduled = {id(scheduler.optimizer) for scheduler in schedulers}
        of_kinds: dict[tuple[type, ...], list[bool]] = {}
        for of_stage in self._stages.optimizers_by_stage:
            are_scheduled = [id(x) in scheduled for x in of_stage]
            kinds = tuple(map(type, of_stage))
            if of_kinds.setdefault(kinds, are_scheduled) != are_scheduled:
                raise RequestError(
                    "the schedulers are for optimizers of some stages of this process "
                    "only, so layers would train at different rates; "
                    "attach(*[make_scheduler(x) for x in pipeline.optimizers])"
                )
        self._schedulers = schedulers

    def state_dict(self, n_steps: int) -> State:
        """The state after some steps."""
        self._stages.synchronize()
        return self._state(n_steps, lambda slot: True)

    def _state(self, n_steps: int, is_saved: Callable[[Slot], bool]) -> State:
        run = self._stages.first.optimizer.history.state_dict()
        local = self._local_model()
        residuals = {local.slot_of(p).saved_as: x for p, x in self._stages.residuals()}
        state = local_state(local, is_saved) | {"residuals": residuals}
        return {**state, "step": n_steps, "run": run}

    def save(
        self,
        folder: str | Path,
        *,
        n_steps: int,
        about: Mapping[str, Any],
        keep: int | None,
        extra: Mapping[str, Any],
        trainable_only: bool,
    ) -> None:
        """Begin to save; ``about`` describes the schedule to its readers."""
        if keep is not None and keep < 1:
            raise RequestError(f"keep is {keep}; it must be at least 1, or None")
        self._stages.synchronize()

        def is_saved(slot: Slot) -> bool:
            return slot.saves and (slot.is_trainable or not trainable_only)

        def take() -> tuple[Manifest, dict[str, Shard]]:
            state = self._state(n_steps, is_saved) | {
                "about": {**about, "trainable_only": trainable_only},
                "extra": dict(extra),
            }
            peers = self._stages.transport.peers
            return _snapshot(state, peers=peers, rank=self._rank)

        with self._stages.reporting("save", of_requests=False):
            self._warn_of_schedulers()
            failure = self._saver.begin(Path(folder), take, keep=keep)
            self._stages.checkpoints = str(folder)
            self._warn(failure, "a checkpoint was not saved, the run continues")

    def _warn_of_schedulers(self) -> None:
        """Warn once of LR schedulers whose state is not saved."""
        scheduled = {id(scheduler.optimizer) for scheduler in self._schedulers}
        if not self._has_warned and any(
            "initial_lr" in group  # every scheduler of torch sets it
            for optimizer in self._stages.optimizers
            if id(optimizer) not in scheduled
            for group in optimizer.param_groups
        ):
            self._has_warned = True
            self._warn(
                "an optimizer has an LR scheduler that is not attached, which will "
                "begin again after a load; call pipeline.attach(*schedulers)",
                "a checkpoint lacks state",
            )

    def finish_saving(self) -> None:
        """Wait until the last save is on the disk."""
        if not self._saver.is_saving:
            return
        with self._stages.reporting("finish saving", of_requests=False):
            failure = self._saver.finish()
        if failure is not None:
            raise CheckpointError(f"the checkpoint was not saved: {failure}")

    def end(self) -> None:
        """Wait for the last save at the end of the run; a failure is logged."""
        if self._stages.has_ended:  # the other ranks may be gone
            return
        try:
            self.finish_saving()
        except CheckpointError as error:
            self._warn(str(error), "the run ends")

    def load_state_dict(self, state: State, *, model_only: bool) -> None:
        """Load a state."""
        self._stages.synchronize()
        with self._stages.reporting("load a state", of_requests=False):
            self._load(lambda: (state, _copy_tensors), model_only=model_only)

    def load(self, path: str | Path, *, model_only: bool, missing_ok: bool) -> State:
        """Load a checkpoint, and return its state; empty if none was loaded."""
        self._stages.synchronize()
        with self._stages.reporting("load", of_requests=False):
            if missing_ok and not self._gather(candidates(Path(path)))[0]:
                return {}
            folder, manifest, damaged = open_newest(
                Path(path), rank=self._rank, gather=self._gather
            )
            for text in damaged:
                self._warn(text, "a damaged checkpoint is passed over")
            state = self._load(
                lambda: read_state(folder, manifest, model_only=model_only),
                model_only=model_only,
            )
        self._stages.checkpoints = str(path)
        return state

    def _load(
        self, read: Callable[[], tuple[State, Copy]], *, model_only: bool
    ) -> State:
        """Load on all ranks, or on none; all must call."""
        local, state, loading = self._local_model(), State(), Loading()
        copy: Copy = _copy_tensors
        try:
            state, copy = read()
            loading = compare(local, state, model_only=model_only)
            if not model_only:
                self._add_residuals(local, state.get("residuals", {}), loading)
        except RequestError as error:
            loading.misfits.append(str(error))
        run = None if model_only else state.get("run")
        if not model_only and not loading.misfits:
            if type(state.get("step")) is not int:
                loading.misfits.append("the number of steps (step) is missing")
            if "run" not in state:
                loading.misfits.append("the state of the run (run) is missing")
        if run is not None:
            loading.misfits += self._stages.first.optimizer.history.check_state(run)
        counts = self._stages.transport.peers.owns(())
        refuse_misfits(loading, state, self._gather, counts=counts)
        with self._stages.running():  # half loaded, it ends
            loading.run(copy)
            if run is not None:
                for executor in self._stages.executors.values():
                    executor.optimizer.history.load_state_dict(run)
            if model_only and self.averager is not None:
                self.averager.begin()
        return state

    def _add_residuals(self, local: LocalModel, saved: State, loading: Loading) -> None:
        """Load residuals; those of another number of replicas begin with 0."""
        for p, here in self._stages.residuals():
            value = saved.get(local.slot_of(p).saved_as)
            if value is not None and value.shape == here.shape:
                loading.pairs.append((value, here))
            else:
                loading.before.append(shard_of(here).numbers.zero_)

    def _local_model(self) -> LocalModel:
        optimizers = self._stages.optimizers_by_stage
        outer = () if self.averager is None else self.averager.outer
        if outer:
            optimizers = [[*x, y] for x, y in zip(optimizers, outer, strict=True)]
        return LocalModel(
            self._stages.layers(),
            self._own_name,
            ties=self._ties,
            optimizers=optimizers,
            schedulers=self._schedulers,
            parameter_of=self._stages.parameter_of,
        )

    def _warn(self, text: str | None, what: str) -> None:
        if text is not None and self._rank == 0:
            _log.warning("%s: %s", what, text)
