"""The state of a pipeline: taken, loaded, saved in the background, resumed.

Names are the model's own, so a state fits any schedule and any number of stages.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from zbpp.checkpoint.experts import ExpertParts
from zbpp.checkpoint.folder import candidates, open_newest
from zbpp.checkpoint.format import CheckpointError, Manifest
from zbpp.checkpoint.model import Fit, LocalModel, Place, State
from zbpp.checkpoint.save import Put, Saver
from zbpp.checkpoint.state import (
    Copy,
    check_state,
    copy_tensors,
    load_state,
    read_state,
    refuse_misfits,
    state_of,
    take_snapshot,
)
from zbpp.core import RequestError
from zbpp.runtime.driver.stages import LocalStages

__all__ = ["Checkpoints"]

_log = logging.getLogger("zbpp")


class Checkpoints:
    """Takes, loads and saves the state of the stages of this process.

    `zbpp.Pipeline` explains the arguments of the methods, and what they raise.

    Args:
        stages: whose state it is.
        own_name: the model's own name of what a layer has under a name.
        ties: places of parameters, and of buffers, that are one in the model.
        rank: of this process.
        expert_mesh: of the processes that have other experts; None: there are none.
    """

    def __init__(
        self,
        stages: LocalStages,
        own_name: Callable[[int, str], str],
        ties: Sequence[Sequence[Place]],
        *,
        rank: int,
        expert_mesh: DeviceMesh | None = None,
    ) -> None:
        self._expert_mesh = expert_mesh
        self._stages, self._own_name, self._ties = stages, own_name, ties
        self._rank, self._gather = rank, stages.transport.gather
        self._saver = Saver(rank, self._gather)
        self._schedulers: tuple[Any, ...] = ()
        self._has_warned = False

    def attach(self, schedulers: tuple[Any, ...]) -> None:
        """Take over LR schedulers, whose state is saved and loaded."""
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
        run = self._stages.history.state_dict()
        return state_of(self._local_model(), step=n_steps, run=run)

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
        """Begin to save; ``about`` describes the schedule to whoever reads it."""
        if keep is not None and keep < 1:
            raise RequestError(f"keep is {keep}; it must be at least 1, or None")
        self._stages.synchronize()

        def take(put: Put) -> Manifest:
            return take_snapshot(
                self._local_model(),
                about,
                self._stages.history.state_dict(),
                put,
                step=n_steps,
                extra=extra,
                peers=self._stages.transport.peers,
                rank=self._rank,
                trainable_only=trainable_only,
            )

        with self._stages.failures_told("save", of_requests=False):
            self._warn_of_schedulers()
            failure = self._saver.begin(Path(folder), take, keep=keep)
            self._stages.checkpoints = str(folder)
            self._warn(failure, "a checkpoint was not saved, the run goes on")

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
        if self._saver.is_saving:
            with self._stages.failures_told("finish saving", of_requests=False):
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

    def load_state_dict(self, state: State, *, model_only: bool) -> int | None:
        """Load a state; return the number of steps done, None if they stay."""
        self._stages.synchronize()
        with self._stages.failures_told("load a state", of_requests=False):
            self._load(lambda: (state, copy_tensors), model_only=model_only)
        return None if model_only else int(state["step"])

    def load(
        self, path: str | Path, *, model_only: bool, missing_ok: bool
    ) -> tuple[dict[str, Any], int | None]:
        """Load a checkpoint, if there must be one or is one.

        Returns:
            The ``extra`` of `save`, and the number of steps done, None if they stay.
        """
        self._stages.synchronize()
        with self._stages.failures_told("load", of_requests=False):
            if missing_ok and not self._gather(candidates(Path(path)))[0]:
                return {}, None
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
        return dict(state["extra"]), None if model_only else manifest.step

    def _load(
        self, read: Callable[[], tuple[State, Copy]], *, model_only: bool
    ) -> State:
        """Load on all ranks, or on none; all must call."""
        local, state, fit = self._local_model(), State(), Fit()
        copy: Copy = copy_tensors
        try:
            state, copy = read()
            fit = check_state(local, state, model_only=model_only)
        except RequestError as error:
            fit.wrong.append(str(error))
        run, history = state.get("run"), self._stages.history
        if not model_only and run is not None:
            fit.wrong += history.check_state(run)
        elif not model_only and "run" not in state and not fit.wrong:
            fit.wrong.append("the state of the run (run) is missing")
        counts = self._stages.transport.peers.owns(())
        refuse_misfits(fit, state, self._gather, counts=counts)
        load_state(local, fit, copy)
        if not model_only and run is not None:
            for executor in self._stages.executors.values():
                executor.optimizer.history.load_state_dict(run)
        return state

    def _local_model(self) -> LocalModel:
        stages = [x.stage for x in self._stages.executors.values()]
        return LocalModel(
            self._stages.layers(),
            self._own_name,
            ties=self._ties,
            copies=dict(pair for x in stages for pair in x.ties.unseen_copies()),
            optimizers=self._stages.optimizers_by_stage,
            schedulers=self._schedulers,
            experts=ExpertParts(
                {p for stage in stages for p in stage.experts}, self._expert_mesh
            ),
        )

    def _warn(self, text: str | None, what: str) -> None:
        if text is not None and self._rank == 0:
            _log.warning("%s: %s", what, text)
