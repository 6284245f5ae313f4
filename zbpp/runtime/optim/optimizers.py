"""The optimizers of one stage, built, stepped and rolled back as if they were one."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from zbpp.runtime.chunk import OwnName
from zbpp.runtime.optim.log_messages import warn_unstepped
from zbpp.runtime.optim.make import MakeOptimizer, made_optimizers
from zbpp.runtime.optim.param_groups import GroupValues, parameters_of
from zbpp.runtime.optim.rollback.buckets import treats_numbers_apart
from zbpp.runtime.optim.rollback.choose import RollbackChooser
from zbpp.runtime.optim.rollback.recompute import Rollback
from zbpp.runtime.optim.step_state import StepRules
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.sharded import is_sharded
from zbpp.runtime.support.torch_internals import has_step_hooks, mark_called

__all__ = ["JointRollback", "MakeOptimizer", "StageOptimizers"]


class StageOptimizers:
    """All optimizers of a stage; false if there are none.

    Args:
        stage: whose parameters are stepped.
        make_optimizer: builds one or several; None: gradients are the caller's.
        rules: how steps are taken.
        own_name: names the parameters to a builder that asks for names.
        is_reporter: whether it says what concerns all stages.

    Raises:
        RequestError: the builder gives something else.
    """

    def __init__(
        self,
        stage: Stage,
        make_optimizer: MakeOptimizer | None,
        rules: StepRules,
        *,
        own_name: OwnName,
        is_reporter: bool,
    ) -> None:
        self._stage = stage
        self._leaves_gradients = make_optimizer is None
        named = list(_named(stage, own_name))
        self.all: list[torch.optim.Optimizer] = []
        if make_optimizer is not None and named:
            self.all = made_optimizers(make_optimizer, named)
        self._rollbacks = [
            RollbackChooser(optimizer, rules, is_reporter=is_reporter)
            for optimizer in self.all
        ]
        self._said: set[Tensor] = set()

    def __bool__(self) -> bool:
        return bool(self.all)

    def parameters(self) -> list[Tensor]:
        """Those that are stepped, as the groups stand now; without a builder all."""
        if self._leaves_gradients:
            return list(_can_learn(self._stage))
        owned = (p for optimizer in self.all for p in parameters_of(optimizer))
        return list(dict.fromkeys(owned))

    def drop_others(self) -> None:
        """Clear gradients that no optimizer steps; name their parameters once.

        Left alone, they would grow from step to step, and take up memory. To leave
        parameters out is a known way to freeze them, so it is no error.
        """
        if self._leaves_gradients:
            return
        owned = set(self.parameters())
        learning = (p for p in _can_learn(self._stage) if p.grad is not None)
        others: set[Tensor] = {p for p in learning if p not in owned}
        for p in others:
            p.grad = None
        if others - self._said:
            warn_unstepped(self._names(others - self._said))
            self._said |= others

    def _names(self, parameters: set[Tensor]) -> list[str]:
        return [name for _, name, p in self._stage.named_stepped() if p in parameters]

    @property
    def must_wait(self) -> bool:
        """A step may do what cannot be rolled back, so it must be taken once.

        Hooks of a step may do anything. On sharded parameters an optimizer that mixes
        numbers communicates, which all processes of the mesh must do at the same time.
        """
        return any(
            has_step_hooks(optimizer)
            or (
                not treats_numbers_apart(optimizer)
                and any(map(is_sharded, parameters_of(optimizer)))
            )
            for optimizer in self.all
        )

    def mark_called(self) -> None:
        """Let learning-rate schedulers know that a step comes before their own."""
        for optimizer in self.all:
            mark_called(optimizer)

    def group_values(self) -> list[GroupValues]:
        """The values of all parameter groups as they are now, by optimizer."""
        return [GroupValues(optimizer) for optimizer in self.all]

    def rollback(self) -> Rollback:
        """Take speculative steps of all; the optimizers may have got hooks by now."""
        return JointRollback([chooser.now() for chooser in self._rollbacks])

    def step(self, values: Sequence[GroupValues], *, skipped: bool) -> None:
        """Step all, or only set back the values of the groups.

        Args:
            values: of the groups at the step's own time, by optimizer; none: as now.
            skipped: there is no step.
        """
        for place, optimizer in enumerate(self.all):
            action = _skip if skipped else optimizer.step
            if values:
                values[place].run(action)
            else:
                action()

    def zero_grad(self) -> None:
        """Clear the gradients that are stepped."""
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)

    def forget(self) -> None:
        """Others may write to parameters and state now."""
        for chooser in self._rollbacks:
            chooser.forget()


class JointRollback:
    """Speculative steps of several optimizers: all are valid, or none is.

    Args:
        rollbacks: one for each, in the order of their steps.
    """

    def __init__(self, rollbacks: Sequence[Rollback]) -> None:
        self._rollbacks = rollbacks

    def speculate(self) -> None:
        """Step all."""
        stepped: list[Rollback] = []
        try:
            for rollback in self._rollbacks:
                rollback.speculate()
                stepped.append(rollback)
        except BaseException:  # as if all had been left to V
            JointRollback(stepped).undo()
            raise

    def commit(self) -> Iterator[None]:
        """Each item is a slice of what is left to do after valid steps."""
        for rollback in self._rollbacks:
            yield from rollback.commit()

    def undo(self) -> None:
        """Roll all back, the last one first: two may step the same parameter."""
        for rollback in reversed(self._rollbacks):
            rollback.undo()

    def forget(self) -> None:
        """Others may write to parameters and state now."""
        for rollback in self._rollbacks:
            rollback.forget()


def _skip() -> None:
    """Take no step."""


def _can_learn(stage: Stage) -> Iterator[nn.Parameter]:
    """The parameters that may have gradients, each once; frozen ones may thaw."""
    return (p for _, _, p in _learning(stage))


def _learning(stage: Stage) -> Iterator[tuple[int, str, nn.Parameter]]:
    """The same with their layers, and their global names."""
    seen: set[Tensor] = set(stage.ties.aliases)
    for layer, name, p in stage.named_stepped():
        if p not in seen and (p.is_floating_point() or p.is_complex()):
            seen.add(p)
            yield layer, name, p


def _named(stage: Stage, own_name: OwnName) -> Iterator[tuple[str, nn.Parameter]]:
    """The same by the model's own names; a tied one has that of its first holder."""
    ties = stage.ties.plan.ties
    first = {own_name(*place): own_name(*tie[0]) for tie in ties for place in tie}
    for _, name, p in _learning(stage):
        yield first.get(name, name), p
