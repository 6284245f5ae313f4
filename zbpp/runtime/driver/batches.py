"""Hand the batch of a step to the stages that read it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from zbpp.core import Placement, RequestError
from zbpp.runtime.backward.wrappers import check_hooks
from zbpp.runtime.comm.transport import Reduction
from zbpp.runtime.executor import Executor
from zbpp.runtime.loss import LossFn
from zbpp.runtime.microbatches import (
    Batch,
    CutBatch,
    MicroBatches,
    Weigh,
    WeighName,
    check_filled,
    check_samples,
    find_weigh,
    repeat_first,
    samples_to_cut,
    split_inputs,
    split_targets,
    weights_of,
)
from zbpp.runtime.optim.same_samples import SameSamples
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.values import mapped

__all__ = ["Batches", "StepPart"]


@dataclass
class StepPart:
    """The call that runs now, of several that add up to one step."""

    n_microbatches: int
    """Of each call."""
    n_calls: int
    n_done: int = 0
    """Calls before this one."""
    weight: float | None = None
    """Of each call; None: this process does not know it."""

    @property
    def first(self) -> int:
        """Micro-batches of the calls before this one."""
        return self.n_done * self.n_microbatches

    def total(self, weight: float) -> float:
        """Return the weight of all calls; refuse a call of another weight."""
        self.weight = weight if self.weight is None else self.weight
        if weight != self.weight:
            raise RequestError(
                f"the batch of this forward_backward() weighs {weight:g}, and that of "
                f"the first one {self.weight:g}; give calls before one optim_step() "
                'equal batches, or a loss that is a sum (reduction="sum")'
            )
        return weight * self.n_calls


class Batches:
    """Cuts batches, weighs micro-batches, and compares samples between stages."""

    def __init__(
        self,
        executors: Mapping[int, Executor],
        placement: Placement,
        cut_batch: CutBatch | None,
        *,
        weigh: WeighName | Weigh,
    ) -> None:
        self._executors = executors
        self._first, self._last = placement.stage_of[0], placement.stage_of[-1]
        self._transport = next(iter(executors.values())).transport
        self._samples = self._compare_samples()
        self._modules: list[nn.Module] = [
            module
            for executor in executors.values()
            for _, layer in executor.stage.numbered()
            for module in layer.modules()
        ]
        self._cut_batch = cut_batch
        self._weigh = find_weigh(weigh)
        self._adds = weigh == "sum"
        for executor in executors.values():
            executor.stage.loss.adds = self._adds

    def pair(self, inputs: Batch, targets: Batch) -> tuple[Batch, Batch]:
        """Return inputs and targets of a batch that may have been given as one."""
        if self._cut_batch is None or inputs is None or targets is not None:
            return inputs, targets
        if not isinstance(inputs, list):
            return self._cut_batch(inputs)
        pairs = [self._cut_batch(part) for part in inputs]
        return [part_inputs for part_inputs, _ in pairs], [
            target for _, target in pairs
        ]

    def begin(
        self,
        inputs: Batch,
        targets: Batch,
        *,
        step: int,
        n_microbatches: int,
        training: bool,
        predicts: bool = False,
        keeps_outputs: bool = False,
        part: StepPart | None = None,
        loss_fn: LossFn | None = None,
        key: Any = None,
    ) -> None:
        """Cut the batch of a step or an evaluation, and give it to the stages."""
        m = n_microbatches
        call = "predict" if predicts else "evaluate"
        self._transport.doing = f"step {step}" if training else call
        cut_inputs: Any = None
        cut_targets: Any = None
        weights = n_filled = part_total = None
        try:
            if training:
                check_hooks(self._modules)
            if self._first in self._executors:
                cut_inputs = split_inputs(inputs, m)
                n_filled = len(cut_inputs)
            if self._last in self._executors and not predicts:
                cut_targets = split_targets(targets, m)
                weights = weights_of(self._weigh, cut_targets)
                weights += [0.0] * (m - len(weights))
                if part is not None and not self._adds:
                    part_total = part.total(sum(weights))
            if not predicts:
                check_samples(*self.samples(inputs, targets))
                check_filled(n_filled, cut_targets and len(cut_targets))
            if training and self._samples is not None:
                is_first = part is None or part.n_done == 0
                self._samples.note(inputs, targets, key, is_first=is_first)
        except RequestError as error:
            self._transport.report(error, ends=False)
            raise
        n_inputs, n_targets = self.samples(inputs, targets)
        if cut_targets is not None:
            n_filled = len(cut_targets)
        peers = self._transport.peers
        if peers.n_peers > 1:
            # Replicas run the same passes: layers may communicate within them.
            if cut_inputs is not None:
                cut_inputs = repeat_first(cut_inputs, m, mapped)
            if cut_targets is not None:
                cut_targets = repeat_first(cut_targets, m, map_tensors)
        whole = None
        if self._adds:
            whole = partial(float, 1.0)
        elif training and peers.sum_dims():
            counts = weights is not None and peers.counts_losses
            weight = sum(weights or []) if counts else 0.0
            numbers = torch.tensor([weight], dtype=torch.float64)
            whole = partial(_number, self._transport.sum_numbers(numbers))
        elif part_total is not None:
            whole = partial(float, part_total)
        batch = MicroBatches(
            m,
            step,
            inputs=cut_inputs,
            targets=cut_targets,
            weights=weights,
            total=whole,
            first=0 if part is None else part.first,
            is_part=part is not None,
            training=training,
            keeps_outputs=predicts or keeps_outputs,
            loss_fn=loss_fn,
            n_inputs=n_inputs,
            n_targets=n_targets,
            n_filled=n_filled,
        )
        for executor in self._executors.values():
            executor.begin(batch)

    def samples(self, inputs: Batch, targets: Batch) -> tuple[int | None, int | None]:
        """Samples of inputs and targets where this process reads them, else None."""
        return (
            samples_to_cut(inputs) if self._first in self._executors else None,
            samples_to_cut(targets) if self._last in self._executors else None,
        )

    def _compare_samples(self) -> SameSamples | None:
        """Let every step compare samples, if processes could be given other ones."""
        peers, transport = self._transport.peers, self._transport
        has_neighbours = "tp" in peers.coordinates
        if transport.is_local or (self._first == self._last and not has_neighbours):
            return None
        ((stage, executor),) = self._executors.items()
        executor.optimizer.samples = SameSamples(
            peers,
            is_first=stage == self._first,
            is_last=stage == self._last,
            parameters=(p for *_, p in executor.stage.named_stepped()),
        )
        return executor.optimizer.samples


def _number(total: Reduction) -> float:
    return float(total.result())
