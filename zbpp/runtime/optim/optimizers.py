"""The optimizers of one stage, built, stepped and rolled back as if they were one."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.chunk import OwnName
from zbpp.runtime.optim.make import MakeOptimizer, made_optimizers
from zbpp.runtime.optim.rollback import (
    DeferredStep,
    Rollback,
    SnapshotStep,
    can_defer,
    copy_groups,
    is_elementwise,
    parameters_of,
)
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.support.sharded import is_sharded
from zbpp.runtime.support.torch_internals import has_step_hooks, mark_called

__all__ = ["GroupValues", "StageOptimizers"]

_log = logging.getLogger("zbpp")

_SMALL_BYTES = 2**20
"""Nobody needs to hear of a copy that takes less than a millisecond."""


class GroupValues:
    """The values of an optimizer's parameter groups, kept for taking a step later.

        O     before --(speculative step)--> after
              scheduler.step() changes the learning rate
        V     now; the step is taken once more with the values ``before``

    A value that is not now what it was after the speculative step has been changed by
    the caller, and stays; any other becomes what the second step makes of it.

    Args:
        optimizer: the speculative step comes between this and `end`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.before = copy_groups(optimizer)
        self._after = self.before

    def end(self) -> None:
        """The speculative step has been taken."""
        self._after = copy_groups(self._optimizer)

    def run(self, action: Callable[[], object]) -> None:
        """Do something with the values as they were before the step."""
        groups = self._optimizer.param_groups
        now = [dict(group) for group in groups]
        changed = [
            {name for name in ours if not _same(ours[name], theirs.get(name))}
            for ours, theirs in zip(
                copy_groups(self._optimizer), self._after, strict=False
            )
        ]
        for group, values in zip(groups, self.before, strict=False):
            for name in group.keys() - values.keys() - {"params"}:
                del group[name]
            group.update(values)
        action()
        for group, ours, names in zip(groups, now, changed, strict=False):
            group.update({name: ours[name] for name in names})
            for name, value in group.items():  # schedulers may hold the same tensor
                held = ours.get(name)
                if isinstance(held, Tensor) and name not in names:
                    held.copy_(value)
                    group[name] = held


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        both = isinstance(left, Tensor) and isinstance(right, Tensor)
        return both and torch.equal(left, right)
    return bool(left == right)


class StageOptimizers:
    """All optimizers of a stage; false if there are none.

    Args:
        stage: whose parameters are stepped.
        make_optimizer: builds one or several; None: gradients are the caller's.
        own_name: names the parameters to a builder that asks for names.
        is_reporter: this stage logs what concerns all stages.

    Raises:
        RequestError: the builder gives something else.
    """

    def __init__(
        self,
        stage: Stage,
        make_optimizer: MakeOptimizer | None,
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
        self._is_reporter = is_reporter
        self._rollbacks: dict[int, Rollback] = {}
        """Of the optimizers in their places, as they have stepped last."""
        self._reported: set[Tensor] = set()
        self.unstepped: list[str] = []
        """Parameters that have gradients and no optimizer, not warned of yet."""

    def __bool__(self) -> bool:
        return bool(self.all)

    def parameters(self) -> list[Tensor]:
        """Parameters of the groups as they are now; without a builder, all."""
        if self._leaves_gradients:
            return list(_trainable(self._stage))
        owned = (p for optimizer in self.all for p in parameters_of(optimizer))
        return list(dict.fromkeys(owned))

    def clear_unowned_grads(self) -> None:
        """Clear gradients that no optimizer steps; note their parameters once.

        Left alone, they would grow from step to step, and take up memory. To leave
        parameters out is a known way to freeze them, so it is no error.
        """
        if self._leaves_gradients:
            return
        owned = set(self.parameters())
        learning = (p for p in _trainable(self._stage) if p.grad is not None)
        unowned: set[Tensor] = {p for p in learning if p not in owned}
        for p in unowned:
            p.grad = None
        if new := unowned - self._reported:
            self._reported |= new
            names = (n for _, n, p in self._stage.named_stepped() if p in new)
            self.unstepped.extend(names)

    def chosen(self) -> tuple[int, list[str], int]:
        """Count what is stepped and learns; name what learns; count all parameters."""
        every = [(name, p) for _, name, p in _numbered(self._stage)]
        n_stepped = sum(p.requires_grad for p in self.parameters())
        return n_stepped, [n for n, p in every if p.requires_grad], len(every)

    @property
    def needs_barrier(self) -> bool:
        """A step may do what cannot be rolled back, so it must be taken once.

        Hooks of a step may do anything. On sharded parameters an optimizer that mixes
        elements communicates, which all processes of the mesh must do at the same time.
        """
        return any(
            has_step_hooks(optimizer)
            or (
                not is_elementwise(optimizer)
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

    def speculate(self) -> None:
        """Step all on the gradients as they are, until `commit` or `undo`.

        If one of the steps raises, none has been taken.
        """
        taken: list[Rollback] = []
        try:
            for place in range(len(self.all)):
                rollback = self._rollback(place)
                rollback.take()
                taken.append(rollback)
        except BaseException:
            for rollback in reversed(taken):
                rollback.undo()
            raise

    def commit(self) -> None:
        """Keep the speculative steps of all."""
        for rollback in self._rollbacks.values():
            rollback.commit()

    def undo(self) -> None:
        """Roll all back, the last one first: two may step the same parameter."""
        for _, rollback in sorted(self._rollbacks.items(), reverse=True):
            rollback.undo()

    def _rollback(self, place: int) -> Rollback:
        """Choose how a step is rolled back: a script may have changed the optimizer."""
        optimizer = self.all[place]
        last = self._rollbacks.get(place)
        if can_defer(optimizer):
            if not isinstance(last, DeferredStep):
                last = DeferredStep(optimizer)
        elif not isinstance(last, SnapshotStep):
            last = SnapshotStep(optimizer)
            if self._is_reporter:
                _warn_snapshot_cost(optimizer)
        self._rollbacks[place] = last
        return last

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


def _skip() -> None:
    """Take no step."""


def _warn_snapshot_cost(optimizer: torch.optim.Optimizer) -> None:
    held = [*parameters_of(optimizer), *tensors_in(optimizer.state)]
    n_bytes = sum(tensor.nbytes for tensor in held)
    if n_bytes < _SMALL_BYTES:
        return
    _log.warning(
        "post-validation: %s can only be rolled back by a copy of its whole state "
        "(%.1f MiB now on stage 0), made in every step; "
        "--no-enable_optimizer_post_validation (post_validation=False) does without",
        type(optimizer).__name__,
        n_bytes / 2**20,
    )


def _trainable(stage: Stage) -> Iterator[nn.Parameter]:
    """The parameters that may have gradients, each once; frozen ones may thaw."""
    return (p for _, _, p in _numbered(stage))


def _numbered(stage: Stage) -> Iterator[tuple[int, str, nn.Parameter]]:
    """The parameters that may have gradients, with layers and global names."""
    seen: set[Tensor] = set(stage.ties.aliases)
    for layer, name, p in stage.named_stepped():
        if p not in seen and (p.is_floating_point() or p.is_complex()):
            seen.add(p)
            yield layer, name, p


def _named(stage: Stage, own_name: OwnName) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters by the model's own names; a tied one has its first name."""
    ties = stage.ties.plan.ties
    first = {own_name(*place): own_name(*tie[0]) for tie in ties for place in tie}
    for _, name, p in _numbered(stage):
        yield first.get(name, name), p
