"""The optimizer step of one stage: behind its barrier, or early and validated later.

    barrier          reduce ---- O: wait, clip, step or skip
    post-validation  reduce ---- O: step at once ---- V: wait; keep the step, or take
                                                         it back, clip, step or skip

Every stage puts the squared gradient norms of its layers into a vector with one entry
per layer of the whole model, and the last chunk's stage adds the losses. The vectors
are summed over the stages: each entry has one summand that is not zero, so the sum is
exact, and its entries are then added in layer order. The norm, the clip factor and
the decision are therefore the same bits on every stage, for any number of stages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zbpp.core import Job
from zbpp.runtime.comm.transport import Transport
from zbpp.runtime.optim.decision import Decision, StepSums, clip_factor, decide
from zbpp.runtime.optim.log_messages import warn_barrier_fallback
from zbpp.runtime.optim.norms import NonFiniteFinder, multiply_gradients, squared_norms
from zbpp.runtime.optim.param_groups import GroupValues
from zbpp.runtime.optim.result import StepResult
from zbpp.runtime.optim.rollback.choose import RollbackChooser
from zbpp.runtime.optim.rollback.recompute import Rollback
from zbpp.runtime.optim.step_state import History, StepRules
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.background import BackgroundWork
from zbpp.runtime.support.errors import NonFiniteError
from zbpp.runtime.support.torch_internals import has_step_hooks, mark_called

__all__ = ["MakeOptimizer", "StageOptimizer", "clip_factor"]

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Called with one stage's parameters."""


@dataclass
class _Pending:
    """A step whose gradients are there and whose decision is not known yet.

    ``local_norm`` is that of this stage's gradients, or 0: if they alone ask for a
    correction, there is no use in stepping early.
    """

    sums: StepSums
    early: bool
    local_norm: float
    values: GroupValues | None = None
    taken: Rollback | None = None
    gradients: Sequence[tuple[nn.Parameter, Tensor | None]] = ()


class StageOptimizer:
    """One stage's share of the optimizer step.

    Args:
        stage: whose parameters are stepped.
        make_optimizer: builds the optimizer; None leaves gradients to the caller.
        n_layers: layers of the whole model.
        rules: how steps are taken.
        background: when this stage waits for messages.
        is_reporter: whether it says what concerns all stages.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        make_optimizer: MakeOptimizer | None,
        n_layers: int,
        rules: StepRules,
        background: BackgroundWork,
        is_reporter: bool = False,
    ) -> None:
        self._stage = stage
        self._clip = rules.clip_grad_norm
        self._n_layers = n_layers
        self._rules = rules
        self._background = background
        self.parameters = [
            p
            for chunk in stage.chunks.values()
            for p in chunk.parameters()
            if p.requires_grad
        ]
        self.optimizer = (
            make_optimizer(self.parameters)
            if make_optimizer is not None and self.parameters
            else None
        )
        self._rollbacks = RollbackChooser(
            self.optimizer, rules, is_reporter=is_reporter
        )
        self.history = History(rules)
        self._finder: NonFiniteFinder | None = None
        self._pending: _Pending | None = None
        self._replay = False
        self._torn = False
        self._error: NonFiniteError | None = None
        self._said = not is_reporter
        self.result: StepResult | None = None
        """Of the last step."""
        self.inject_fault: Callable[[str], None] = _nothing
        """Called with the name of what comes now, for faults on demand."""

    # In the order of a step.

    def begin_backward(self) -> None:
        """The last step has been decided: what follows from it for this one."""
        if self.history.scaler is not None:
            self._stage.loss_scale = self.history.scaler.scale
        self._finder = NonFiniteFinder(self._stage) if self.history.searches else None

    def reduce(self, transport: Transport) -> None:
        """Start the sum of norms and losses over all stages."""
        multiply_gradients(self.parameters, 1.0 / self._stage.loss_scale)
        n_losses = self._stage.n_microbatches
        n_notes = self._n_layers if self._finder is not None else 0
        vector = torch.zeros(
            self._n_layers + n_losses + n_notes,
            dtype=torch.float64,
            device=self._stage.device,
        )
        for layer, squared in squared_norms(self._stage):
            vector[layer] = squared
        for microbatch, loss in self._stage.losses.items():
            vector[self._n_layers + microbatch] = loss
        if self._finder is not None:
            for layer, note in self._finder.found.items():
                vector[self._n_layers + n_losses + layer] = note
            self._finder = None
        early = self.history.early
        local_norm = 0.0
        if early and not vector.is_cuda:  # there, reading it would hold up the host
            local_norm = float(vector[: self._n_layers].sum().sqrt())
        sums = StepSums(
            transport.reduce(vector),
            n_layers=self._n_layers,
            n_microbatches=n_losses,
            step=self._stage.step,
        )
        self._pending = _Pending(sums, early, local_norm)
        self.result = StepResult(sums, self._clip, speculative=early)

    def ready(self) -> bool:
        """Whether `step` goes on without another stage of this process."""
        pending = self._pending
        if pending is None or (pending.early and not self._waits()):
            return True
        return pending.sums.ready()

    def step(self, job: Job) -> None:
        """Step at once, or wait for the norm first; see above."""
        pending = self._pending
        assert pending is not None, "a Step needs a Reduce before it"
        if self.optimizer is not None:
            mark_called(self.optimizer)
        if not pending.early:
            self.settle(job)
        elif self._waits() or pending.sums.done():
            self._settle(job)  # what is wrong is told at V, where all stages are
        elif self.optimizer is not None:
            pending.values = GroupValues(self.optimizer)
            if not decide(pending.local_norm, self._clip).corrects:
                rollback = self._rollbacks.now()
                rollback.speculate()
                pending.taken = rollback
                pending.values.end()
                self._background.offer(self._keep(pending, rollback))
            pending.gradients = [(p, p.grad) for p in self.parameters]
            self.optimizer.zero_grad(set_to_none=True)  # the caller might do so too

    def before_gradients(self) -> None:
        """What a right step has left to do needs the gradients of that step."""
        self._background.finish()

    @property
    def may_replay(self) -> bool:
        """Whether `validate` may find that the last step was taken wrongly."""
        return self._replay or (self._pending is not None and self._pending.early)

    def ready_to_validate(self) -> bool:
        """Whether `validate` goes on without another stage of this process."""
        return self._pending is None or self._pending.sums.ready()

    def validate(self, job: Job) -> bool:
        """Settle the last step.

        Returns:
            Whether it was taken early and was wrong: what has been computed since, on
            whatever stage, does not count. The same on every stage.
        """
        self._settle(job)
        self._raise()
        replay, self._replay = self._replay, False
        return replay

    def wait(self) -> None:
        """Wait for the last step's sums, and leave everything as it is."""
        if self._pending is not None:
            self._pending.sums.read()

    def settle(self, job: Job | None = None) -> None:
        """Wait for the decision on the last step and leave the state that it asks for.

        The caller may then write to parameters and state.

        Raises:
            NonFiniteError: too many steps in a row were skipped.
            RuntimeError: an exception has interrupted an optimizer step.
        """
        self._settle(job)
        self._background.finish()
        self._rollbacks.forget()
        self._raise()

    # How it is done.

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _settle(self, job: Job | None) -> None:
        if self._torn:
            raise RuntimeError(
                "an optimizer step was interrupted by an exception, so parameters and "
                "optimizer state do not belong together; go on from a checkpoint"
            )
        pending = self._pending
        if pending is None:
            return
        decision = decide(pending.sums.norm(job), self._clip)
        if self.optimizer is not None:
            self._carry_out(decision, pending)
        self._pending = None
        self._replay = pending.early and decision.corrects
        trusted = self.history.early
        try:
            self.history.note(decision, pending.sums)
        except NonFiniteError as error:
            self._error = error
        if trusted and not self.history.early and not self._said:
            self._said = True
            warn_barrier_fallback(self._rules.patience)

    def _carry_out(self, decision: Decision, pending: _Pending) -> None:
        optimizer, taken = self.optimizer, pending.taken
        assert optimizer is not None
        if taken is not None and not decision.corrects:
            self.inject_fault("commit")  # `_keep` is under way, or comes
        else:
            self._background.offer(None)
            self._rollbacks.forget()
            for parameter, gradient in pending.gradients:
                parameter.grad = gradient
            if taken is not None:
                self.inject_fault("undo")
                taken.undo()
            self.inject_fault("redo")
            self._torn = True
            multiply_gradients(self.parameters, decision.factor)
            action = _nothing if decision.skipped else optimizer.step
            if pending.values is None:
                action()
            else:
                pending.values.run(action)
        optimizer.zero_grad(set_to_none=True)
        self._torn = False

    def _keep(self, pending: _Pending, taken: Rollback) -> Iterator[bool]:
        """Once the step is known to be right, do what it has left to do."""
        while not pending.sums.done():
            yield False
        if decide(pending.sums.norm(), self._clip).corrects:
            return
        try:
            for _ in taken.commit():
                yield True
        except GeneratorExit:
            raise
        except BaseException:
            self._torn = True
            raise

    def _waits(self) -> bool:
        """Hooks of a step may do what cannot be taken back: they see the right one."""
        return self.optimizer is not None and has_step_hooks(self.optimizer)


def _nothing(*_: object) -> None:
    """A skipped step."""
