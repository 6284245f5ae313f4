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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zbpp.core import Job, RequestError
from zbpp.runtime.chunk import OwnName
from zbpp.runtime.comm.transport import Transport
from zbpp.runtime.optim.decision import Decision, StepResult
from zbpp.runtime.optim.make import MakeOptimizer
from zbpp.runtime.optim.norms import multiply_gradients, squared_norms
from zbpp.runtime.optim.optimizers import StageOptimizers
from zbpp.runtime.optim.same_samples import SameSamples
from zbpp.runtime.optim.step_state import History
from zbpp.runtime.parallel.reductions import TopKSum
from zbpp.runtime.policies import StepPolicy
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.errors import NonFiniteError, SumsError
from zbpp.runtime.support.sharded import is_sharded, place_gradients


@dataclass
class _Pending:
    """A step whose gradients are there and whose decision is not known yet."""

    result: StepResult
    gradients: Sequence[tuple[Tensor, Tensor | None]] | None = None
    """Taken from the parameters at O; None: no optimizer has stepped yet."""
    marks: Sequence[tuple[Tensor, object]] = ()
    """Of the parameters after O, as long as nothing may write to them."""


def _mark(parameter: Tensor) -> object:
    """Return what changes with a write or with other memory; None: unknown here."""
    if type(parameter) not in (Tensor, nn.Parameter):
        return None
    return parameter._version, parameter.data_ptr()


class StageOptimizer:
    """One stage's share of the optimizer step.

    ``post_validation`` of the policy is False where the schedule has no V's. Without a
    builder of optimizers gradients are left to the caller.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        make_optimizer: MakeOptimizer | None,
        n_layers: int,
        policy: StepPolicy,
        clip_grad_norm: float | None,
        own_name: OwnName,
        top_k: TopKSum | None = None,
    ) -> None:
        self._stage = stage
        self._top_k = top_k
        self._clip = clip_grad_norm
        self._n_layers = n_layers
        self.optimizers = StageOptimizers(
            stage,
            make_optimizer,
            own_name=own_name,
            offloads=policy.offload_optimizer,
        )
        self.host = self.optimizers.host
        self.speculates = policy.post_validation is not False
        """Some steps may be speculative."""
        self.history = History(policy)
        self.samples: SameSamples | None = None
        """That the processes of the pipeline were given; None: nothing to compare."""
        self._pending: _Pending | None = None
        self._is_invalid = False
        """The last step was speculative and is done right by now, but forwards after it
        have used wrong parameters, here or on another stage."""
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
        self._check_writes()
        if self._pending is not None:
            self._pending.marks = ()  # forwards may write; a replay does so again
        self.host.refresh()
        if self._is_invalid:
            self.host.arrive_all()
            parameters = self.optimizers.parameters()
            self._before_replay = [(p, p.detach().clone()) for p in parameters]

    def begin_backward(self) -> None:
        """Begin the backwards; the last step has been decided."""
        if self.history.scaler is not None:
            self._stage.loss_scale = self.history.scaler.scale

    def reduce(self, transport: Transport) -> None:
        """Start the sum of norms and losses over all stages."""
        stage, optimizers, peers = self._stage, self.optimizers, transport.peers
        optimizers.clear_unowned_grads()
        parameters = optimizers.parameters()
        self._end_gradients(parameters)
        counted = [p for p in parameters if p not in stage.ties.copies]
        norms = squared_norms(stage, counted, self._n_layers, peers)
        losses = stage.loss.table()
        self.result = StepResult(
            transport,
            norms,
            losses if peers.counts_losses else torch.zeros_like(losses),
            norms[:0] if self.samples is None else self.samples.vector(),
            step=stage.batch.step,
            adds=stage.loss.adds,
            clip_grad_norm=self._clip,
            speculative=self.history.speculates,
        )
        self._pending = _Pending(self.result)

    def _end_gradients(self, parameters: Sequence[Tensor]) -> None:
        """No more is added to these gradients: bring them into their last form."""
        parameters = [p for p in parameters if p not in self.host.gradients]
        place_gradients([p for p in parameters if is_sharded(p)])
        multiply_gradients(parameters, 1.0 / self._stage.loss_scale)
        self.host.copy_out(parameters)

    def copy_out(self, chunk: int) -> None:
        """Begin to copy gradients to the host, where optimizers step there.

        Those of tied parameters, and of a step in parts, are not complete yet.
        """
        parameters = self.host.chunks[chunk]
        if parameters and not self._stage.batch.is_part:
            ties = {x.parameter for x in self._stage.ties.parameters.values()}
            self._end_gradients([p for p in parameters if p not in ties])

    @property
    def steps_at_once(self) -> bool:
        """True if `step` does not wait for the sums."""
        pending = self._pending
        return pending is None or (
            pending.result.speculative and not self.optimizers.needs_barrier
        )

    def ready(self) -> bool:
        """True if `step` needs to wait for no other stage of this process."""
        return self.steps_at_once or self.ready_to_validate()

    def step(self, job: Job) -> None:
        """Step at once, or wait for the sums first; see above."""
        pending = self._pending
        assert pending is not None, "a Step needs a Reduce before it"
        self.optimizers.mark_called()
        self.host.deliver()
        if not pending.result.speculative:
            self._decide(job)
            self._raise()
        elif self.optimizers.needs_barrier:
            self._decide(job)  # if it is invalid, V raises, where all stages are
        elif self.optimizers:
            self.optimizers.speculate()
            pending.gradients = [(p, p.grad) for p in self.optimizers.stepped()]
            self.optimizers.zero_grad()  # the caller might do so too
            pending.marks = [(p, _mark(p)) for p in self.optimizers.parameters()]

    @property
    def may_replay(self) -> bool:
        """True if `validate` may find that the last step was invalid."""
        return self._is_invalid or (
            self._pending is not None and self._pending.result.speculative
        )

    def ready_to_validate(self) -> bool:
        """True if `validate` needs to wait for no other stage of this process."""
        return self._pending is None or self._pending.result.ready()

    def validate(self, job: Job) -> bool:
        """Decide on the last step, and leave the state that the decision asks for.

        Returns:
            True if it was speculative and invalid: what has been computed since, on
            whatever stage, does not count. The same on every stage.
        """
        self._decide(job)
        self._raise()
        must_replay, self._is_invalid = self._is_invalid, False
        with torch.no_grad():
            for parameter, copy in self._before_replay:
                parameter.copy_(copy)
        self._before_replay = []
        return must_replay

    def wait(self, job: Job | None = None) -> None:
        """Wait for the last step's sums, and leave everything as it is."""
        if self._pending is not None:
            self._pending.result.wait(job)

    def settle(self, job: Job | None = None) -> None:
        """Wait for the decision on the last step and leave the state that it asks for.

        The caller may then write to parameters and state.

        Raises:
            NonFiniteError: too many steps in a row were skipped.
            RequestError: others have written to what the step has changed.
        """
        self.host.refresh()
        self._decide(job)
        self.host.arrive_all(may_differ=True)
        self._raise()

    # The transitions.

    def _check_writes(self) -> None:
        """Notice what others have written to parameters after a speculative O.

        A rollback would undo the write, so it is an error even if the step turns out
        valid: else a run would depend on its luck. Writes through ``tensor.data``, and
        those to sharded tensors and to optimizer state, are not seen.

        Raises:
            RequestError: names the parameters.
        """
        marks = () if self._pending is None else self._pending.marks
        changed = {p for p, at in marks if _mark(p) != at}
        if not changed:
            return
        names = [name for _, name, p in self._stage.named_stepped() if p in changed]
        raise RequestError(
            f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''} changed after "
            "an optimizer step that is not validated yet, and a rollback would undo "
            "the change; call pipeline.synchronize() before you write to parameters "
            "or optimizer state (or switch post_validation off)"
        )

    def _decide(self, job: Job | None) -> None:
        """Wait for the sums, and end the step as they ask for.

        Raises:
            RequestError: others have written to what the step has changed.
        """
        pending, text = self._pending, None
        if pending is None:
            return
        self._check_writes()
        result = pending.result
        result.wait(job)
        decision = result.decision()
        if self.samples is not None:
            text = self.samples.difference(result.digests(), result.step)
        if text is not None:
            decision = Decision(1.0, skipped=True)
        if self._top_k is not None:
            self._top_k.settle(skipped=decision.skipped)
        self._finish(pending, decision)
        self._pending, self._is_invalid = None, False
        if text is not None:
            self._error = SumsError(text)
            return
        self._is_invalid = pending.result.speculative and decision.requires_rollback
        try:
            self.history.note(decision, result)
        except NonFiniteError as error:
            self._error = error

    def _finish(self, pending: _Pending, decision: Decision) -> None:
        """Keep the step, or roll it back and take it once more."""
        optimizers = self.optimizers
        if not optimizers:
            return
        if pending.gradients is not None:
            if not decision.requires_rollback:
                optimizers.commit()
                return
            for parameter, gradient in pending.gradients:
                parameter.grad = gradient
            optimizers.undo()
        multiply_gradients(optimizers.stepped(), decision.factor)
        optimizers.step(skipped=decision.skipped)
        optimizers.zero_grad()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
