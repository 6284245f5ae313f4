"""Optimizer state, and what a step needs for a while: the optimizer runs on fakes.

Replicas that divide parameters keep parts of them as `fully_shard` makes them, along
the first dimension and rounded up: of a matrix of 10 rows the first of 4 has 3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.memory.tracker import StorageTracker
from zbpp.runtime.optim.make import MakeOptimizer, made_optimizers
from zbpp.runtime.optim.rollback import DeferredStep, can_defer, is_elementwise

__all__ = ["OptimizerMemory", "optimizer_memory", "part_of", "part_shape"]


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of a stage's optimizer.

    Args:
        state: there all the time after the first step.
        peak: most that a step behind a barrier needs besides.
        rollback: copies that post-validation keeps.
        speculative_peak: most that a speculative step needs besides.
        commit_peak: most that its confirmation needs, in the next step.
    """

    state: int = 0
    peak: int = 0
    rollback: int = 0
    speculative_peak: int = 0
    commit_peak: int = 0


class _StepTracker(StorageTracker):  # type: ignore[no-untyped-call]
    """Optimizers may read numbers, which fake tensors do not have: 1 stands for all."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def optimizer_memory(
    mode: Any,
    named: Mapping[nn.Parameter, str],
    gradients: Mapping[nn.Parameter, int],
    make_optimizer: MakeOptimizer | None,
    *,
    granularity: int = 1,
    n_parts: Mapping[nn.Parameter, int],
) -> OptimizerMemory:
    """Step twice, and see what is left and what was needed.

    Args:
        mode: of the fake tensors.
        named: parameters of a stage, and their names.
        gradients: bytes, of those parameters that get one.
        make_optimizer: builds one or several; None: there is no step.
        granularity: of allocations.
        n_parts: processes that divide each parameter among them; without: 1.
    """
    parameters = [p for p in named if p.is_floating_point() or p.is_complex()]
    if make_optimizer is None or not parameters:
        return OptimizerMemory()
    parts = {p: part_of(mode, p, n_parts.get(p, 1)) for p in parameters}
    gradients = {parts[p]: size for p, size in gradients.items() if p in parts}
    names = {parts[p]: named[p] for p in parameters}
    parameters = list(names)
    tracker = _StepTracker(granularity=granularity)
    with mode:
        stands = [_stand_in(p, p in gradients) for p in parameters]
        tracker.ignore(stands)
        tracker.ignore(p.grad for p in stands if p.grad is not None)
        with tracker:
            pairs = list(zip(names.values(), stands, strict=True))
            optimizers = made_optimizers(make_optimizer, pairs)
            for optimizer in optimizers:
                optimizer.step()
            state = tracker.restart()
            for optimizer in optimizers:
                optimizer.step()
            peak = tracker.most - state
        copied = tracker.bytes_of(p for p in parameters if p in gradients)
        if not all(map(can_defer, optimizers)):
            return OptimizerMemory(state, peak, copied + state, peak)
        apart, later = _deferred_peaks(names, gradients, make_optimizer, granularity)
    return OptimizerMemory(state, peak, copied, apart, later)


def _deferred_peaks(
    names: Mapping[nn.Parameter, str],
    gradients: Mapping[nn.Parameter, int],
    make_optimizer: MakeOptimizer,
    granularity: int,
) -> tuple[int, int]:
    """Peak bytes of `DeferredStep`, of a step and of its commit."""
    tracker = _StepTracker(granularity=granularity)
    stands = [(name, _stand_in(p, p in gradients)) for p, name in names.items()]
    tracker.ignore(p for _, p in stands)
    tracker.ignore(p.grad for _, p in stands if p.grad is not None)
    most = later = 0
    with tracker:
        for optimizer in made_optimizers(make_optimizer, stands):
            if not is_elementwise(optimizer):
                return 0, 0
            optimizer.step()
            rollback = DeferredStep(optimizer)
            rollback.take()  # makes the copies, which stay
            rollback.undo()
            before = tracker.restart()
            rollback.take()
            most = max(most, tracker.most - before)
            before = tracker.restart()
            rollback.commit()
            later = max(later, tracker.most - before)
    return max(0, most), later


def _stand_in(parameter: Tensor, has_gradient: bool) -> nn.Parameter:
    empty = torch.empty_like(parameter, requires_grad=False)
    stand = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    if has_gradient:
        stand.grad = torch.empty_like(empty)
    return stand


def part_shape(shape: Sequence[int], n: int) -> tuple[int, ...]:
    """Shape of the first replica's part of n; what has no dimension stays whole.

    >>> part_shape((10, 7), 4)
    (3, 7)
    """
    return (ceil(shape[0] / n), *shape[1:]) if len(shape) else ()


def part_of(mode: Any, parameter: nn.Parameter, n: int) -> nn.Parameter:
    """Make a fake parameter of the part's shape; the parameter itself if n is 1."""
    if n == 1:
        return parameter
    with mode:
        part = torch.empty(
            part_shape(parameter.shape, n),
            dtype=parameter.dtype,
            device=parameter.device,
        )
        return nn.Parameter(part, requires_grad=parameter.requires_grad)
