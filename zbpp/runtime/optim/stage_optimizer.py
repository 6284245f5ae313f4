"""The optimizer step of one stage: behind its barrier, or speculative.

    barrier          reduce ---- O: wait, clip, step or skip
    post-validation  reduce ---- O: step at once ---- V: wait; keep the step, or roll
                                                         it back, clip, step or skip

Every stage puts the squared gradient norms of its layers into a vector with one entry
per layer of the whole model, and the last chunk's stage adds the losses. The vectors
are summed over the stages: each entry has one summand that is not zero, so the sum is
exact, and its entries are then added in layer order. The norm, the clip factor and
the decision are therefore the same bits on every stage, for any number of stages.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from zbpp.core import Job
from zbpp.runtime.chunk import OwnName
from zbpp.runtime.comm.transport import Transport
from zbpp.runtime.optim.decision import Decision, StepSums, clip_factor, decide
from zbpp.runtime.optim.log_messages import warn_barrier_fallback
from zbpp.runtime.optim.norms import NonFiniteFinder, multiply_gradients
from zbpp.runtime.optim.optimizers import MakeOptimizer, StageOptimizers
from zbpp.runtime.optim.param_groups import GroupValues
from zbpp.runtime.optim.result import StepResult
from zbpp.runtime.optim.rollback.recompute import Rollback
from zbpp.runtime.optim.step_state import History, StepRules
from zbpp.runtime.optim.step_vector import step_vector
from zbpp.runtime.optim.untouched import Untouched
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.background import BackgroundWork
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.errors import NonFiniteError, torn_step
from zbpp.runtime.support.fault_injection import InjectFault, no_fault
from zbpp.runtime.support.sharded import is_sharded, sum_partial

__all__ = ["MakeOptimizer", "StageOptimizer", "clip_factor"]


@dataclass
class _Pending:
    """A step whose gradients are there and whose decision is not known yet.

    ``local_norm`` is that of this stage's gradients, or 0: if they alone ask for a
    correction, there is no use in stepping before it.
    """

    sums: StepSums
    speculative: bool
    local_norm: float
    values: Sequence[GroupValues] = ()
    stepped: Rollback | None = None
    gradients: Sequence[tuple[Tensor, Tensor | None]] = ()


class StageOptimizer:
    """One stage's share of the optimizer step.

    Args:
        stage: whose parameters are stepped.
        make_optimizer: builds one or several; None leaves gradients to the caller.
        n_layers: layers of the whole model.
        rules: how steps are taken.
        own_name: the model's own names of parameters.
        background: when this stage waits for messages.
        is_reporter: whether it says what concerns all stages.
        inject_fault: called with the name of what comes now, for faults on demand.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        make_optimizer: MakeOptimizer | None,
        n_layers: int,
        rules: StepRules,
        own_name: OwnName,
        background: BackgroundWork,
        is_reporter: bool = False,
        inject_fault: InjectFault = no_fault,
    ) -> None:
        self._stage = stage
        self._clip = rules.clip_grad_norm
        self._n_layers = n_layers
        self._rules = rules
        self._background = background
        self.optimizers = StageOptimizers(
            stage,
            make_optimizer,
            rules,
            own_name=own_name,
            is_reporter=is_reporter,
        )
        self._untouched = Untouched(stage, self.optimizers)
        self.speculates = rules.post_validation
        """Some steps may be speculative."""
        self.history = History(rules)
        self._finder: NonFiniteFinder | None = None
        self._sums: StepSums | None = None
        self._pending: _Pending | None = None
        self._replay = False
        self._torn = False
        self._error: Exception | None = None
        self._said = not is_reporter
        self.result: StepResult | None = None
        """Of the last step."""
        self._inject_fault = inject_fault

    # In the order of a step.

    def begin_step(self) -> None:
        """Another step begins, and the last one may not be decided yet.

        Raises:
            RequestError: others have written to what that one has stepped.
        """
        self._untouched.check()
        self._untouched.end()  # forwards may change parameters: replays do so again
        self._sums = None

    def begin_backward(self) -> None:
        """The last step has been decided: what follows from it for this one."""
        if self.history.scaler is not None:
            self._stage.loss_scale = self.history.scaler.scale
        if self._finder is not None:
            self._finder.watch()
        elif self.history.searches:
            self._finder = NonFiniteFinder(self._stage)

    def reduce(self, transport: Transport) -> None:
        """Start the sum of norms and losses over all stages."""
        self.optimizers.drop_others()
        parameters = self.optimizers.parameters()
        if any(map(is_sharded, parameters)):
            sum_partial(parameters)
        factor = self._stage.gradient_factor / self._stage.loss_scale
        multiply_gradients(parameters, factor)
        vector = step_vector(
            *(self._stage, parameters, transport.peers),
            n_layers=self._n_layers,
            finder=self._finder,
        )
        self._finder = None
        speculative = self.history.speculates
        local_norm = 0.0
        if speculative and not runs_ahead(vector.device):  # there it holds up the host
            local_norm = float(vector[: self._n_layers].sum().sqrt())
        sums = StepSums(
            transport.reduce(vector),
            n_layers=self._n_layers,
            n_microbatches=self._stage.first + self._stage.n_microbatches,
            metrics=self._stage.loss.names,
            n_tied=len(self._stage.ties.plan.slots),
            step=self._stage.step,
            peers=transport.peers,
        )
        self._sums = sums
        self._pending = _Pending(sums, speculative, local_norm)
        self.result = StepResult(sums, self._clip, speculative=speculative)

    @property
    def counts(self) -> bool:
        """True if the step has all its gradients, on all stages of this process.

        It is then decided like any other, even if an exception tears the rest of it.
        """
        sums = self._sums
        return sums is not None and sums.step == self._stage.step and sums.ready()

    @property
    def steps_at_once(self) -> bool:
        """True if `step` does not wait for the sum."""
        one = self._pending
        return one is None or (one.speculative and not self.optimizers.must_wait)

    def ready(self) -> bool:
        """True if `step` goes on without another stage of this process."""
        return self.steps_at_once or self.ready_to_validate()

    def step(self, job: Job) -> None:
        """Step at once, or wait for the norm first; see above."""
        pending = self._pending
        assert pending is not None, "a Step needs a Reduce before it"
        optimizers = self.optimizers
        optimizers.mark_called()
        if not pending.speculative:
            self.settle(job)
        elif optimizers.must_wait or pending.sums.done():
            self._settle(job)  # an invalid one is told at V, where all stages are
        elif optimizers:
            self._speculate(pending)
            self._untouched.begin()

    def _speculate(self, pending: _Pending) -> None:
        """Step at once, unless it is known already that the step is invalid."""
        pending.values = self.optimizers.group_values()
        if not decide(pending.local_norm, self._clip).corrects:
            rollback = self.optimizers.rollback()
            rollback.speculate()
            pending.stepped = rollback
            for values in pending.values:
                values.end()
            self._background.offer(self._keep(pending, rollback))
        # also where nothing is stepped yet: others' copies have been refreshed by now
        self._stage.ties.note_write()
        pending.gradients = [(p, p.grad) for p in self.optimizers.parameters()]
        self.optimizers.zero_grad()  # the caller might do so too

    def before_gradients(self) -> None:
        """Finish the last valid step: it needs the gradients of that step."""
        self._background.finish()

    @property
    def may_replay(self) -> bool:
        """True if `validate` may find that the last step was invalid."""
        return self._replay or (self._pending is not None and self._pending.speculative)

    def ready_to_validate(self) -> bool:
        """True if `validate` goes on without another stage of this process."""
        return self._pending is None or self._pending.sums.ready()

    def validate(self, job: Job) -> bool:
        """Settle the last step.

        Returns:
            True if it was speculative and invalid: what has been computed since, on
            whatever stage, does not count. The same on every stage.
        """
        self._settle(job)
        self._raise()
        replay, self._replay = self._replay, False
        return replay

    def wait(self, job: Job | None = None) -> None:
        """Wait for the last step's sums, and leave everything as it is."""
        if self._pending is not None:
            self._pending.sums.read(job)

    def settle(self, job: Job | None = None) -> None:
        """Wait for the decision on the last step and leave the state that it asks for.

        The caller may then write to parameters and state. A step that an exception has
        torn before all stages had their gradients is taken back.

        Raises:
            NonFiniteError: too many steps in a row were skipped.
            RequestError: others have written to what the step has changed.
            RuntimeError: an exception has interrupted an optimizer step.
        """
        self._untouched.check()
        if self._pending is not None and not self._pending.sums.ready():
            self._take_back(self._pending)
        self._settle(job)
        self._background.finish()
        self.optimizers.forget()
        self._raise()

    # How it is done.

    def _take_back(self, pending: _Pending) -> None:
        """Leave the state before a step whose sums will never be complete."""
        self._untouched.end()
        if self.optimizers:
            self._carry_out(decide(math.nan, self._clip), pending)
        self._pending = None

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _settle(self, job: Job | None) -> None:
        if self._torn:
            raise torn_step(self._stage.step)
        pending = self._pending
        if pending is None:
            return
        decision = decide(pending.sums.norm(job), self._clip)
        self._untouched.end()
        if self.optimizers:
            self._carry_out(decision, pending)
        self._pending = None
        self._replay = pending.speculative and decision.corrects
        speculated = self.history.speculates
        try:
            self.history.note(decision, pending.sums)
        except NonFiniteError as error:
            self._error = error
        self._error = self._error or self._stage.ties.difference(pending.sums.tied())
        if speculated and not self.history.speculates and not self._said:
            self._said = True
            warn_barrier_fallback(self._rules.patience)

    def _carry_out(self, decision: Decision, pending: _Pending) -> None:
        optimizers, stepped = self.optimizers, pending.stepped
        if stepped is not None and not decision.corrects:
            self._inject_fault("commit")  # `_keep` is under way, or comes
        else:
            self._background.offer(None)
            optimizers.forget()
            for parameter, gradient in pending.gradients:
                parameter.grad = gradient
            if stepped is not None:
                self._inject_fault("undo")
                stepped.undo()
            self._inject_fault("redo")
            self._torn = True
            multiply_gradients(optimizers.parameters(), decision.factor)
            optimizers.step(pending.values, skipped=decision.skipped)
        optimizers.zero_grad()
        self._stage.ties.note_write()
        self._torn = False

    def _keep(self, pending: _Pending, stepped: Rollback) -> Iterator[bool]:
        """Once the step is known to be valid, do what it has left to do."""
        while not pending.sums.done():
            yield False
        if decide(pending.sums.norm(), self._clip).corrects:
            return
        self._untouched.end()
        try:
            for _ in stepped.commit():
                yield True
        except GeneratorExit:
            raise
        except BaseException:
            self._torn = True
            raise
