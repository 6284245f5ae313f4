"""The state of a pipeline: taken, loaded, saved in the background, resumed.

Names are the model's own, so a state fits any schedule and any number of stages.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zbpp.checkpoint.folder import open_newest
from zbpp.checkpoint.manifest import CheckpointError
from zbpp.checkpoint.model import LocalModel
from zbpp.checkpoint.saving import Saver, Snapshot
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
from zbpp.core import RequestError, Schedule
from zbpp.models import Layered
from zbpp.runtime.driver import collective_calls as calls
from zbpp.runtime.driver.lifecycle import Lifecycle
from zbpp.runtime.executor import Executor
from zbpp.runtime.parallel.mesh import Place
from zbpp.runtime.ties.plan import TiePlan

__all__ = ["Checkpoints"]

_LOG = logging.getLogger("zbpp")


class Checkpoints:
    """The part of a pipeline that takes, loads and saves its state."""

    schedule: Schedule
    split: tuple[range, ...]
    rank: int
    _executors: Mapping[int, Executor]
    _lifecycle: Lifecycle
    _n_steps: int
    layered: Layered
    _ties: TiePlan
    place: Place
    _schedulers: tuple[Any, ...] = ()
    _saver: Saver | None = None

    if TYPE_CHECKING:
        optimizers: Any

        def synchronize(self) -> None:
            """Settle the last step; `zbpp.Pipeline` does."""

        def gather(self, thing: Any) -> list[Any]:
            """Give every process the things of all."""

        def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
            """This process's layers, validated."""

    def attach(self, *schedulers: Any) -> None:
        """Hand over LR schedulers of `optimizers`: their state is saved and loaded.

        The script still steps them.

        Raises:
            RequestError: one is not of an optimizer of this pipeline.
        """
        known = {id(optimizer) for optimizer in self.optimizers}
        for one in schedulers:
            if id(getattr(one, "optimizer", None)) not in known:
                raise RequestError(
                    f"the {type(one).__name__} is not of an optimizer of this "
                    "pipeline; make one for each of pipeline.optimizers"
                )
        self._schedulers = schedulers

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This process's buffers under their global names, validated."""
        for name, layer in self.named_layers():
            yield from layer.named_buffers(prefix=name)

    def state_dict(self) -> State:
        """The validated state of this process's stages, by the model's own names.

        Parameters, persistent buffers, optimizers, attached schedulers, loss scale,
        number of steps, and the state of post-validation. Tensors are not copied. In
        one process it is the state of the whole model.
        """
        return state_of(self._owned(), step=self._n_steps, run=self._run_state())

    def load_state_dict(self, state: State, *, model_only: bool = False) -> None:
        """Go on from a state (every rank must call).

        Args:
            state: of `state_dict`, of this split or any other; what other ranks hold
                may be in it.
            model_only: load parameters and buffers, and leave all else as it is.

        Raises:
            RequestError: something is missing, unknown or of another shape; it is
                named, and nothing is changed.
        """
        self.synchronize()
        with self._errors_told("load a state"):
            owned = self._owned()
            try:
                checked = check_state(owned, state, model_only=model_only)
            except RequestError as error:
                checked = Checked(wrong=[str(error)])
            given = {part: set(state.get(part, ())) for part in checked.used}
            self._take(state, checked, given, model_only=model_only)

    def save(
        self,
        folder: str | Path,
        *,
        keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
        wait: bool = False,
        trainable_only: bool = False,
    ) -> None:
        """Save a checkpoint while the run goes on (every rank must call).

        The call waits for the decision on the last step and for a copy of the state;
        files are written in the background, into ``folder/step-<steps done>``, which
        is there when all of it is on the disk, or not at all. A save before that has
        not ended is waited for; if it failed, that is logged.

        Args:
            folder: of this run's checkpoints; all ranks see the same.
            keep: checkpoints that stay, the newest; None: all.
            extra: numbers, texts, tensors and containers of them, which `load` returns:
                the place in the data, for instance. Rank 0's counts.
            wait: return when it is on the disk.
            trainable_only: leave out frozen parameters, their optimizer state, and all
                buffers: such a checkpoint, of a LoRA for instance, is loaded onto a
                model that has them already.

        Raises:
            CheckpointError: the folder cannot be written; with ``wait``, or it failed.
            RequestError: part of the state is nothing that a checkpoint can hold.
        """
        if keep is not None and keep < 1:
            raise RequestError(f"keep is {keep}; it must be at least 1, or None")
        self.synchronize()
        with self._errors_told("save"):
            try:
                snapshot: Snapshot | str = take_snapshot(
                    *(self._owned(), self._about(), self._run_state()),
                    step=self._n_steps,
                    extra=extra or {},
                    saves=self.place.peers.row == 0,
                    trainable_only=trainable_only,
                )
            except RequestError as error:
                snapshot = str(error)
            if self._saver is None:
                self._saver = Saver(self.rank, self.gather)
            self._warn(self._saver.begin(Path(folder), snapshot, keep=keep))
        if wait:
            self.finish_saving()

    def finish_saving(self) -> None:
        """Wait until the last save is on the disk (every rank must call).

        Raises:
            CheckpointError: it failed; the checkpoints before it are as they were.
        """
        if self._saver is not None and self._saver.is_saving:
            with self._errors_told("finish saving"):
                failure = self._saver.finish()
            if failure is not None:
                raise CheckpointError(f"the checkpoint was not saved: {failure}")

    def _end_saving(self) -> None:
        """Wait for the last save at the end; a failure is logged."""
        if self._lifecycle.has_ended:  # the other ranks may be gone
            return
        try:
            self.finish_saving()
        except CheckpointError as error:
            self._warn(str(error), what="the run ends")

    def load(self, path: str | Path, *, model_only: bool = False) -> dict[str, Any]:
        """Go on from a checkpoint (every rank must call).

        Args:
            path: of a checkpoint, or the folder that `save` was given: then the newest
                one that is not damaged, and a damaged one is logged.
            model_only: load parameters and buffers, and leave all else as it is.

        Returns:
            What `save` was given as ``extra``.

        Raises:
            CheckpointError: there is none; or names the damaged files.
            RequestError: it does not fit this model; nothing is changed.
        """
        self.synchronize()
        with self._errors_told("load"):
            folder, manifest, passed = open_newest(
                Path(path), rank=self.rank, gather=self.gather
            )
            for words in passed:
                self._warn(words, what="a damaged checkpoint is passed over")
            owned = self._owned()
            state: State = {}
            try:
                state = read_state(folder, manifest, owned, model_only=model_only)
                checked = check_state(owned, state, model_only=model_only)
            except RequestError as error:
                checked = Checked(wrong=[str(error)])
            names = names_in(manifest)
            given = {part: names[part] for part in checked.used}
            state.setdefault("aliases", manifest.aliases)
            self._take(state, checked, given, model_only=model_only)
        return dict(state.get("extra") or {})

    def _take(
        self,
        state: State,
        checked: Checked,
        given: Mapping[str, set[str]],
        *,
        model_only: bool,
    ) -> None:
        """Load on all ranks, or on none."""
        histories = [one.optimizer.history for one in self._executors.values()]
        if not model_only and "run" in state:
            checked.wrong += self._run_misfits(state["run"])
        elif not model_only and not checked.wrong:
            checked.wrong.append("the state of the run (run) is missing")
        refuse_misfits(checked, given, state.get("aliases", {}), self.gather)
        load_state(checked)
        if not model_only:
            self._n_steps = int(state["step"])
            for history in histories:
                history.load_state_dict(state["run"])

    def _owned(self) -> LocalModel:
        layers = (
            pair for one in self._executors.values() for pair in one.stage.numbered()
        )
        return LocalModel(
            layers,
            self.layered.own_name,
            ties=(*self._ties.ties, *self.layered.buffers),
            copies={
                copy: original
                for one in self._executors.values()
                for copy, original in one.stage.ties.unseen_copies()
            },
            optimizers=self.optimizers,
            schedulers=self._schedulers,
        )

    def _run_misfits(self, saved: Any) -> list[str]:
        """Words about a saved state of the run that cannot go on here."""
        history = next(iter(self._executors.values())).optimizer.history
        here = history.state_dict()
        words = misfit(saved, {**here, "scaler": None}, "the state of the run")
        if words is not None:
            return [words]
        wrong: list[str] = history.check_state(saved)
        words = misfit(saved["scaler"], here["scaler"], "the state of the loss scale")
        return wrong or ([] if words is None else [words])

    def _run_state(self) -> dict[str, Any]:
        return next(iter(self._executors.values())).optimizer.history.state_dict()

    def _about(self) -> dict[str, Any]:
        return {
            "mode": self.schedule.name,
            "n_stages": self.schedule.n_stages,
            "n_microbatches": self.schedule.n_microbatches,
            "split": [len(layers) for layers in self.split],
        }

    def _warn(
        self,
        words: str | None,
        what: str = "a checkpoint was not saved, the run goes on",
    ) -> None:
        if words is not None and self.rank == 0:
            _LOG.warning("%s: %s", what, words)

    @contextmanager
    def _errors_told(self, doing: str) -> Iterator[None]:
        """Tell the other ranks of errors that they do not find themselves."""
        next(iter(self._executors.values())).transport.doing = doing
        try:
            yield
        except RequestError:
            raise
        except BaseException as error:
            calls.tell_failure(self._executors, error)
            raise
