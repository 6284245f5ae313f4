"""The optimizer step of one stage: behind a barrier, or speculative.

    barrier          reduce ---- O: wait, clip, step or skip
    post-validation  reduce ---- O: step at once ---- V: wait; keep the step, or roll
                                                         it back, clip, step or skip

Every stage puts the squared gradient norms of its layers into a vector with one entry
per layer of the whole model, and the last chunk's stage adds the losses. The vectors
are summed over the stages: each entry has one summand that is not zero, so the sum is
exact, and its entries are then added in layer order. The norm, the clip factor and
the decision are therefore the same bits on every stage, for any number of stages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from zbpp.core import Job, RequestError
from zbpp.runtime.chunk import OwnName
from zbpp.runtime.comm.transport import Transport
from zbpp.runtime.optim.decision import (
    Decision,
    StepResult,
    StepSums,
    StepVectorLayout,
)
from zbpp.runtime.optim.make import MakeOptimizer
from zbpp.runtime.optim.norms import multiply_gradients, squared_norms
from zbpp.runtime.optim.optimizers import GroupValues, StageOptimizers
from zbpp.runtime.optim.same_samples import N_NUMBERS, SameSamples
from zbpp.runtime.optim.step_state import History, StepRules
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.errors import NonFiniteError, SumsError
from zbpp.runtime.support.marks import Mark, mark
from zbpp.runtime.support.sharded import is_sharded, place_gradients

__all__ = ["MutationGuard", "StageOptimizer", "StepState"]


class StepState(Enum):
    """Where the last step of a stage stands.

    IDLE -> REDUCING -> IDLE                        behind a barrier
                     -> SPECULATED -> IDLE          valid: kept
                                   -> INVALID       rolled back, and taken again
                                      INVALID -> IDLE at V, where all stages replay
    """

    IDLE = auto()
    """The last step is decided and done."""
    REDUCING = auto()
    """The gradients are there, and their sums are under way; nothing is stepped."""
    SPECULATED = auto()
    """O is over, and the sums are not known; what is stepped may have to be undone."""
    INVALID = auto()
    """The step is done right, but forwards after it have used wrong parameters, here
    or on another stage: the next V must ask for a replay."""


class MutationGuard:
    """Notices what others write to parameters and state from O to V.

        O    step, speculatively          marks are taken
             the script writes to p       p is no longer what the step has left
        V    an invalid step would be rolled back, and the write with it

    So a write in between is an error even if the step turns out valid: otherwise a run
    would depend on its luck. Writes through ``tensor.data`` leave no mark and are not
    seen, nor are those to sharded tensors.

    Args:
        stage: names the parameters in the error.
        optimizers: step the parameters.
    """

    def __init__(self, stage: Stage, optimizers: StageOptimizers) -> None:
        self._stage = stage
        self._optimizers = optimizers
        self._marks: list[tuple[Tensor, Mark]] = []

    def begin(self) -> None:
        """The step has been taken; from now on nobody may write."""
        self._marks = [(tensor, mark(tensor)) for _, _, tensor in self._tensors()]

    def end(self) -> None:
        """Writes are zbpp's own, or harmless."""
        self._marks = []

    def check(self) -> None:
        """Find what has been written to.

        Raises:
            RequestError: it names the first such tensor.
        """
        if all(mark(tensor) == at for tensor, at in self._marks):
            return
        changed = {id(tensor) for tensor, at in self._marks if mark(tensor) != at}
        names = [
            f"{self._name(parameter)}{what}"
            for parameter, what, tensor in self._tensors()
            if id(tensor) in changed
        ]
        raise RequestError(
            f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} changed after "
            "an optimizer step that is not validated yet, and a rollback would undo "
            "the change; call pipeline.synchronize() before you write to parameters "
            "or optimizer state (or switch post_validation off)"
        )

    def _tensors(self) -> Iterable[tuple[Tensor, str, Tensor]]:
        """Each with the parameter that it belongs to, and a description."""
        for p in self._optimizers.parameters():
            yield p, "", p
        for optimizer in self._optimizers.all:
            for p, state in optimizer.state.items():
                for name, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor) and isinstance(p, Tensor):
                        yield p, f" ({name} in {type(optimizer).__name__})", value

    def _name(self, parameter: Tensor) -> str:
        for _, name, p in self._stage.named_stepped():
            if p is parameter:
                return name
        return f"a parameter of shape {tuple(parameter.shape)}"


@dataclass
class _Pending:
    """A step whose gradients are there and whose decision is not known yet.

    Args:
        sums: of all stages, under way.
        speculative: O does not wait for them.
        groups: values of the parameter groups that the step belongs to.
        has_stepped: the optimizers have stepped at O.
        gradients: of the step, taken from the parameters at O.
    """

    sums: StepSums
    speculative: bool
    groups: Sequence[GroupValues] = ()
    has_stepped: bool = False
    gradients: Sequence[tuple[Tensor, Tensor | None]] = ()


class StageOptimizer:
    """One stage's share of the optimizer step.

    Args:
        stage: whose parameters are stepped.
        make_optimizer: builds one or several; None leaves gradients to the caller.
        n_layers: layers of the whole model.
        rules: how steps are taken.
        own_name: the model's own names of parameters.
        is_reporter: this stage logs what concerns all stages.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        make_optimizer: MakeOptimizer | None,
        n_layers: int,
        rules: StepRules,
        own_name: OwnName,
        is_reporter: bool = False,
    ) -> None:
        self._stage = stage
        self._clip = rules.clip_grad_norm
        self._n_layers = n_layers
        self.optimizers = StageOptimizers(
            stage,
            make_optimizer,
            own_name=own_name,
            is_reporter=is_reporter,
        )
        self._guard = MutationGuard(stage, self.optimizers)
        self.speculates = rules.post_validation
        """Some steps may be speculative."""
        self.history = History(rules)
        self.samples: SameSamples | None = None
        """That the processes of the pipeline were given; None: nothing to compare."""
        self._state = StepState.IDLE
        self._pending: _Pending | None = None
        self._error: NonFiniteError | SumsError | None = None
        """Found at O, and raised at V, where all stages find it."""
        self._before_replay: list[tuple[Tensor, Tensor]] = []
        """Parameters and copies, where forwards may write to them and run again."""
        self.result: StepResult | None = None
        """Of the last step."""

    # In the order of a step.

    def begin_step(self) -> None:
        """Begin another step; the last one may not be decided yet.

        Raises:
            RequestError: others have written to what the last step has changed.
        """
        self._guard.check()
        self._guard.end()  # forwards may change parameters: replays do so again
        if self._state is StepState.INVALID:
            parameters = self.optimizers.parameters()
            self._before_replay = [(p, p.detach().clone()) for p in parameters]

    def begin_backward(self) -> None:
        """Begin the backwards; the last step has been decided."""
        if self.history.scaler is not None:
            self._stage.loss_scale = self.history.scaler.scale

    def reduce(self, transport: Transport) -> None:
        """Start the sum of norms and losses over all stages."""
        stage, optimizers = self._stage, self.optimizers
        optimizers.clear_unowned_grads()
        parameters = optimizers.parameters()
        sharded = [p for p in parameters if is_sharded(p)]
        place_gradients(sharded)
        multiply_gradients(parameters, 1.0 / stage.loss_scale)
        layout = StepVectorLayout(
            self._n_layers,
            stage.first + stage.n_microbatches,
            adds=stage.loss.adds,
            n_samples=0 if self.samples is None else N_NUMBERS,
        )
        peers = transport.peers
        counted = [p for p in parameters if p not in stage.ties.copies]
        vector = layout.vector(
            stage.device,
            norms=squared_norms(stage, counted, peers),
            losses=stage.loss.table() if peers.counts_losses else None,
            samples=self.samples,
        )
        speculative = self.history.speculates
        sums = StepSums(transport.reduce(vector), layout, step=stage.step, peers=peers)
        self._pending = _Pending(sums, speculative)
        self._state = StepState.REDUCING
        self.result = StepResult(sums, self._clip, speculative=speculative)

    @property
    def steps_at_once(self) -> bool:
        """True if `step` does not wait for the sums."""
        pending = self._pending
        return pending is None or (
            pending.speculative and not self.optimizers.needs_barrier
        )

    def ready(self) -> bool:
        """True if `step` goes on without another stage of this process."""
        return self.steps_at_once or self.ready_to_validate()

    def step(self, job: Job) -> None:
        """Step at once, or wait for the sums first; see above."""
        pending = self._pending
        assert pending is not None, "a Step needs a Reduce before it"
        self.optimizers.mark_called()
        if not pending.speculative:
            self.settle(job)
        elif self.optimizers.needs_barrier:
            self._decide(job)  # if it is invalid, V says so, where all stages are
        else:
            self._speculate(pending)

    @property
    def may_replay(self) -> bool:
        """True if `validate` may find that the last step was invalid."""
        return self._state is StepState.INVALID or (
            self._pending is not None and self._pending.speculative
        )

    def ready_to_validate(self) -> bool:
        """True if `validate` goes on without another stage of this process."""
        return self._pending is None or self._pending.sums.ready()

    def validate(self, job: Job) -> bool:
        """Decide on the last step, and leave the state that the decision asks for.

        Returns:
            True if it was speculative and invalid: what has been computed since, on
            whatever stage, does not count. The same on every stage.
        """
        self._decide(job)
        self._raise()
        must_replay = self._state is StepState.INVALID
        self._state = StepState.IDLE
        with torch.no_grad():
            for parameter, copy in self._before_replay:
                parameter.copy_(copy)
        self._before_replay = []
        return must_replay

    def wait(self, job: Job | None = None) -> None:
        """Wait for the last step's sums, and leave everything as it is."""
        if self._pending is not None:
            self._pending.sums.read(job)

    def settle(self, job: Job | None = None) -> None:
        """Wait for the decision on the last step and leave the state that it asks for.

        The caller may then write to parameters and state.

        Raises:
            NonFiniteError: too many steps in a row were skipped.
            RequestError: others have written to what the step has changed.
        """
        self._guard.check()
        self._decide(job)
        self._raise()

    # The transitions.

    def _speculate(self, pending: _Pending) -> None:
        """Step before the norm is known."""
        optimizers = self.optimizers
        if optimizers:
            pending.groups = optimizers.group_values()
            optimizers.speculate()
            pending.has_stepped = True
            for values in pending.groups:
                values.end()
            self._stage.ties.note_write()
            pending.gradients = [(p, p.grad) for p in optimizers.parameters()]
            optimizers.zero_grad()  # the caller might do so too
            self._guard.begin()
        self._state = StepState.SPECULATED

    def _decide(self, job: Job | None) -> None:
        """Wait for the sums, and end the step as they ask for."""
        pending = self._pending
        if pending is None:
            return
        decision = pending.sums.decision(self._clip, job)
        text = self._other_samples(pending.sums)
        if text is not None:
            decision = Decision(decision.norm, 1.0, skipped=True)
        self._finish(pending, decision)
        self._pending, self._state = None, StepState.IDLE
        if text is not None:
            self._error = SumsError(text)
            return
        if pending.speculative and decision.requires_rollback:
            self._state = StepState.INVALID
        try:
            self.history.note(decision, pending.sums)
        except NonFiniteError as error:
            self._error = error

    def _other_samples(self, sums: StepSums) -> str | None:
        """Say where processes were given other samples; None: nowhere."""
        if self.samples is None:
            return None
        return self.samples.difference(sums.samples(), sums.step)

    def _finish(self, pending: _Pending, decision: Decision) -> None:
        """Keep the step, or roll it back and take it once more."""
        self._guard.end()
        optimizers = self.optimizers
        if not optimizers:
            return
        if pending.has_stepped and not decision.requires_rollback:
            optimizers.commit()
            optimizers.zero_grad()
            self._stage.ties.note_write()
            return
        for parameter, gradient in pending.gradients:
            parameter.grad = gradient
        if pending.has_stepped:
            optimizers.undo()
        multiply_gradients(optimizers.parameters(), decision.factor)
        optimizers.step(pending.groups, skipped=decision.skipped)
        optimizers.zero_grad()
        self._stage.ties.note_write()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
