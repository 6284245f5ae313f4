"""The optimizers of one stage, built, stepped and rolled back as if they were one."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.runtime.chunk import OwnName
from zbpp.runtime.optim.host import HostMasters, make_master
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
from zbpp.runtime.support.sharded import WholeSums, is_sharded
from zbpp.runtime.support.torch_internals import has_step_hooks, mark_called


class _GroupValues:
    """The options of an optimizer's parameter groups at the time of a step.

        O     before --(speculative step)--> after
              scheduler.step() changes the learning rate
        V     now; the step is taken once more with the options ``before``

    An option that is not now what it was after the speculative step has been changed by
    the caller, and stays; any other becomes what the second step makes of it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before = self._after = copy_groups(optimizer)

    def end(self) -> None:
        """The speculative step has been taken."""
        self._after = copy_groups(self._optimizer)

    def run(self, action: Callable[[], object]) -> None:
        """Do something with the options as they were before the step."""
        groups = self._optimizer.param_groups
        now = [dict(group) for group in groups]
        for group, before in zip(groups, self._before, strict=False):
            for name in group.keys() - before.keys() - {"params"}:
                del group[name]
            group.update(before)
        action()
        for group, ours, after in zip(groups, now, self._after, strict=False):
            for name in ours.keys() - {"params"}:
                if not _same(ours[name], after.get(name)):
                    group[name] = ours[name]
                elif isinstance(ours[name], Tensor) and name in group:
                    ours[name].copy_(group[name])  # schedulers may refer to it
                    group[name] = ours[name]


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return type(left) is type(right) and bool(left == right)


class StageOptimizers:
    """All optimizers of a stage; false if there are none."""

    def __init__(
        self,
        stage: Stage,
        make_optimizer: MakeOptimizer | None,
        *,
        own_name: OwnName,
        offloads: bool = False,
    ) -> None:
        self._stage = stage
        self._leaves_gradients = make_optimizer is None
        named = list(_named(stage, own_name))
        masters = {p: make_master(p) for _, p in named} if offloads else {}
        self.all: list[torch.optim.Optimizer] = []
        if make_optimizer is not None and named:
            stepped = [(name, masters.get(p, p)) for name, p in named]
            self.all = made_optimizers(make_optimizer, stepped)
        chosen = set(self.stepped())
        self.host = HostMasters(
            {p: master for p, master in masters.items() if master in chosen}, stage
        )
        """Stepped in place of the parameters of the stage, if they are offloaded."""
        if offloads and self._mixes_shards:
            raise RequestError(
                "offload_optimizer is on, and an optimizer of shards needs whole "
                "parameters; choose one that updates each element by itself, such as "
                "AdamW, or leave out offload_optimizer or the shards"
            )
        self._rollbacks: list[Rollback] = []
        """Of the optimizers in their places, as they have stepped last."""
        self._values: list[_GroupValues] = []
        """Of the speculative step that is not decided yet."""

    def __bool__(self) -> bool:
        return bool(self.all)

    def parameters(self) -> list[Tensor]:
        """Parameters of the groups as they are now; without a builder, all."""
        if self._leaves_gradients:
            return [p for _, p in _learnable(self._stage)]
        of = self.host.parameter_of
        return [of.get(p, p) for p in self.stepped()]

    def stepped(self) -> list[Tensor]:
        """The tensors that the optimizers step: parameters, or their masters."""
        owned = (p for optimizer in self.all for p in parameters_of(optimizer))
        return list(dict.fromkeys(owned))

    def clear_unowned_grads(self) -> None:
        """Clear gradients that no optimizer steps: they would grow from step to step.

        To leave parameters out is a known way to freeze them, so it is no error.
        """
        owned = set(self.parameters())
        for _, p in _learnable(self._stage):
            if p not in owned:
                p.grad = None

    def chosen(self) -> tuple[list[str], list[str], int]:
        """Names of what learns and is stepped, and is not; the number of parameters."""
        every, owned = list(_learnable(self._stage)), set(self.parameters())
        learning = [(name, p in owned) for name, p in every if p.requires_grad]
        stepped = [name for name, is_owned in learning if is_owned]
        return stepped, [n for n, is_owned in learning if not is_owned], len(every)

    @property
    def needs_barrier(self) -> bool:
        """A step may do what cannot be rolled back, so it must be taken once.

        Hooks of a step may do anything. On sharded parameters an optimizer that mixes
        elements communicates, which all processes of the mesh must do at the same time.
        """
        return any(map(has_step_hooks, self.all)) or self._mixes_shards

    @property
    def _mixes_shards(self) -> bool:
        return any(
            not is_elementwise(x) and any(map(is_sharded, parameters_of(x)))
            for x in self.all
        )

    def mark_called(self) -> None:
        """Let learning-rate schedulers see an optimizer step before their step."""
        for optimizer in self.all:
            mark_called(optimizer)

    def speculate(self) -> None:
        """Step all on the gradients as they are, until `commit` or `undo`.

        If one of the steps raises, none has been taken.
        """
        self.host.begin_step()
        self._values = [_GroupValues(optimizer) for optimizer in self.all]
        # a script may have changed an optimizer since the step before
        last = dict(enumerate(self._rollbacks))
        self._rollbacks = [
            _rollback(optimizer, last.get(place))
            for place, optimizer in enumerate(self.all)
        ]
        taken: list[Rollback] = []
        try:
            for rollback in self._rollbacks:
                rollback.take()
                taken.append(rollback)
        except BaseException:
            for rollback in reversed(taken):
                rollback.undo()
            raise
        for values in self._values:
            values.end()

    def commit(self) -> None:
        """Keep the speculative steps of all."""
        self._values = []
        for rollback in self._rollbacks:
            rollback.commit()

    def undo(self) -> None:
        """Roll all back, the last one first: two may step the same parameter."""
        self.host.begin_step()
        for rollback in reversed(self._rollbacks):
            rollback.undo()

    def step(self, *, skipped: bool) -> None:
        """Step all, or none; with the options of a speculative step that was undone."""
        self.host.begin_step()
        values, self._values = dict(enumerate(self._values)), []
        for place, optimizer in enumerate(self.all):
            action: Callable[[], object] = int if skipped else partial(_take, optimizer)
            if place in values:
                values[place].run(action)
            else:
                action()

    def zero_grad(self) -> None:
        """Clear the gradients that are stepped."""
        for optimizer in self.all:
            optimizer.zero_grad(set_to_none=True)


def _take(optimizer: torch.optim.Optimizer) -> None:
    """Step once; those of torch know by themselves what a sum over shards is."""
    is_foreign = not can_defer(optimizer)
    has_shards = is_foreign and any(map(is_sharded, parameters_of(optimizer)))
    with WholeSums() if has_shards else nullcontext():
        optimizer.step()


def _rollback(optimizer: torch.optim.Optimizer, last: Rollback | None) -> Rollback:
    """Choose how a step is rolled back; ``last``: the step before was so."""
    kind = DeferredStep if can_defer(optimizer) else SnapshotStep
    return last if isinstance(last, kind) else kind(optimizer)


def _learnable(stage: Stage) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that may have gradients, each once, also if frozen now."""
    seen: set[Tensor] = set(stage.ties.aliases)
    for _, name, p in stage.named_stepped():
        if p not in seen and (p.is_floating_point() or p.is_complex()):
            seen.add(p)
            yield name, p


def _named(stage: Stage, own_name: OwnName) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters by the model's names; tied ones have their first name."""
    ties = stage.ties.plan.ties
    first = {own_name(*place): own_name(*tie[0]) for tie in ties for place in tie}
    for name, p in _learnable(stage):
        yield first.get(name, name), p
