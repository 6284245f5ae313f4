"""The state of a pipeline: taken, loaded, saved in the background, resumed.

Names are the model's own, so a state fits any schedule and any number of stages.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from zbpp.checkpoint.experts import ExpertParts
from zbpp.checkpoint.folder import candidates, open_newest
from zbpp.checkpoint.manifest import CheckpointError, Manifest
from zbpp.checkpoint.model import LocalModel
from zbpp.checkpoint.saving import Put, Saver
from zbpp.checkpoint.state import (
    Checked,
    State,
    check_state,
    load_state,
    names_in,
    read_state,
    refuse_misfits,
    state_of,
    take_snapshot,
)
from zbpp.checkpoint.values import misfit
from zbpp.core import RequestError
from zbpp.models import Layered, Tie
from zbpp.runtime.driver.stages import LocalStages

__all__ = ["Checkpoints"]

_log = logging.getLogger("zbpp")


class Checkpoints:
    """Takes, loads and saves the state of the stages of this process.

    `zbpp.Pipeline` explains the arguments of the methods, and what they raise.

    Args:
        stages: whose state it is.
        layered: the model, which knows its own names.
        ties: parameters that several layers share.
        rank: of this process; rank 0 writes what concerns all.
        writes: this process writes the parts of its stage; its peers have the same.
        expert_mesh: of the processes that hold other experts; None: there are none.
    """

    def __init__(
        self,
        stages: LocalStages,
        layered: Layered,
        ties: tuple[Tie, ...],
        *,
        rank: int,
        writes: bool,
        expert_mesh: DeviceMesh | None = None,
    ) -> None:
        self._expert_mesh = expert_mesh
        self._stages = stages
        self._layered = layered
        self._ties = ties
        self._rank = rank
        self._writes = writes
        self._schedulers: tuple[Any, ...] = ()
        self._saver: Saver | None = None
        self._has_warned = False

    def attach(self, schedulers: tuple[Any, ...]) -> None:
        """Take over LR schedulers, whose state is saved and loaded."""
        stages = self._stages.optimizers_by_stage
        optimizers = {id(optimizer) for every in stages for optimizer in every}
        for scheduler in schedulers:
            if id(getattr(scheduler, "optimizer", None)) not in optimizers:
                raise RequestError(
                    f"the {type(scheduler).__name__} is not of an optimizer of this "
                    "pipeline; make one for each of pipeline.optimizers"
                )
        scheduled = {id(scheduler.optimizer) for scheduler in schedulers}
        patterns = {
            tuple((type(x).__name__, id(x) in scheduled) for x in every)
            for every in stages
        }
        for one in patterns:
            for other in patterns:
                if one != other and [x for x, _ in one] == [x for x, _ in other]:
                    raise RequestError(
                        "the schedulers are for optimizers of some stages of this "
                        "process only, so layers would train at different rates; "
                        "attach(*[make_scheduler(x) for x in pipeline.optimizers])"
                    )
        self._schedulers = schedulers

    def state_dict(self, n_steps: int) -> State:
        """The state after some steps."""
        self._stages.synchronize()
        run = self._stages.history.state_dict()
        return state_of(self._local_model(), step=n_steps, run=run)

    def load_state_dict(self, state: State, *, model_only: bool) -> int | None:
        """Load a state; return the number of steps done, None if they stay."""
        self._stages.synchronize()
        with self._stages.failures_told("load a state", of_requests=False):
            local = self._local_model()
            try:
                checked = check_state(local, state, model_only=model_only)
            except RequestError as error:
                checked = Checked(wrong=[str(error)])
            return self._take(state, checked, state, model_only=model_only)

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
        """Begin to save; files are written in the background.

        Args:
            folder: of this run's checkpoints.
            n_steps: steps done.
            about: the schedule, for whoever reads the manifest.
            keep: checkpoints that stay.
            extra: what `load` shall return.
            trainable_only: leave out what is not trained.
        """
        if keep is not None and keep < 1:
            raise RequestError(f"keep is {keep}; it must be at least 1, or None")
        self._stages.synchronize()
        with self._stages.failures_told("save", of_requests=False):
            self._warn_of_schedulers()
            if self._saver is None:
                self._saver = Saver(self._rank, self._stages.transport.gather)

            def take(put: Put) -> Manifest:
                return take_snapshot(
                    self._local_model(),
                    about,
                    self._stages.history.state_dict(),
                    put,
                    step=n_steps,
                    extra=extra,
                    saves=self._writes,
                    trainable_only=trainable_only,
                )

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
        if self._saver is not None and self._saver.is_saving:
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

    def load(
        self, path: str | Path, *, model_only: bool, missing_ok: bool
    ) -> tuple[dict[str, Any], int | None]:
        """Load a checkpoint, if there must be one or is one.

        Returns:
            The ``extra`` of `save`, and the number of steps done, None if they stay.
        """
        self._stages.synchronize()
        gather = self._stages.transport.gather
        with self._stages.failures_told("load", of_requests=False):
            if missing_ok and not gather(candidates(Path(path)))[0]:
                return {}, None
            folder, manifest, damaged = open_newest(
                Path(path), rank=self._rank, gather=gather
            )
            for text in damaged:
                self._warn(text, "a damaged checkpoint is passed over")
            local = self._local_model()
            state: State = {}
            try:
                state = read_state(folder, manifest, local, model_only=model_only)
                checked = check_state(local, state, model_only=model_only)
            except RequestError as error:
                checked = Checked(wrong=[str(error)])
            state.setdefault("aliases", manifest.aliases)
            n_steps = self._take(
                state, checked, names_in(manifest), model_only=model_only
            )
        self._stages.checkpoints = str(path)
        return dict(state.get("extra") or {}), n_steps

    def _take(
        self,
        state: State,
        checked: Checked,
        names: Mapping[str, Iterable[str]],
        *,
        model_only: bool,
    ) -> int | None:
        """Load on all ranks, or on none."""
        run = state.get("run")
        if not model_only and run is not None:
            checked.wrong += self._run_misfits(run)
        elif not model_only and "run" not in state and not checked.wrong:
            checked.wrong.append("the state of the run (run) is missing")
        refuse_misfits(
            checked, names, state.get("aliases", {}), self._stages.transport.gather
        )
        load_state(checked)
        if model_only:
            return None
        if run is not None:
            for executor in self._stages.executors.values():
                executor.optimizer.history.load_state_dict(run)
        return int(state["step"])

    def _local_model(self) -> LocalModel:
        stages = [x.stage for x in self._stages.executors.values()]
        return LocalModel(
            self._stages.layers(),
            self._layered.own_name,
            ties=(*self._ties, *self._layered.buffers),
            copies={
                copy: original
                for stage in stages
                for copy, original in stage.ties.unseen_copies()
            },
            optimizers=self._stages.optimizers_by_stage,
            schedulers=self._schedulers,
            experts=ExpertParts(
                {p for stage in stages for p in stage.experts}, self._expert_mesh
            ),
        )

    def _run_misfits(self, saved: Any) -> list[str]:
        """Say why a saved state of the run cannot go on here; empty if it can."""
        history = self._stages.history
        here = history.state_dict()
        text = misfit(saved, {**here, "scaler": None}, "the state of the run")
        if text is not None:
            return [text]
        wrong: list[str] = history.check_state(saved)
        text = misfit(saved["scaler"], here["scaler"], "the state of the loss scale")
        return wrong or ([] if text is None else [text])

    def _warn(self, text: str | None, what: str) -> None:
        if text is not None and self._rank == 0:
            _log.warning("%s: %s", what, text)
