"""Give the stages the batch of a step, or of one of its parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from zbpp.core import (
    AddTied,
    Instruction,
    Program,
    Receive,
    Reduce,
    RequestError,
    Send,
    Step,
    TiedGradient,
)
from zbpp.runtime.backward.wrappers import check_hooks
from zbpp.runtime.comm.transport import Reduction
from zbpp.runtime.driver.stages import LocalStages
from zbpp.runtime.microbatches import (
    Batch,
    CutBatch,
    MicroBatches,
    Weigh,
    WeighName,
    check_samples,
    find_weigh,
    samples_to_cut,
    split_inputs,
    split_targets,
    weights_of,
)
from zbpp.runtime.optim.same_samples import SameSamples


@dataclass
class StepPart:
    """Calls of `zbpp.Pipeline.forward_backward` that add up to one step."""

    n_calls: int
    n_done: int = 0
    weight: float | None = None
    """Of each call; None: this process does not know it."""

    def total(self, weight: float) -> float:
        """Return the weight of all calls; refuse a call of another weight."""
        self.weight = weight if self.weight is None else self.weight
        if weight != self.weight:
            raise RequestError(
                f"the batch of this forward_backward() has weight {weight:g}, and the "
                f"first one {self.weight:g}; pass batches of equal weight before an "
                'optim_step(), or a loss that is a sum (reduction="sum")'
            )
        return weight * self.n_calls


def parts_of_step(
    programs: Sequence[Program],
) -> tuple[tuple[Program, ...], tuple[Program, ...]]:
    """Cut the programs of a step into its passes, and the rest, which follows them.

    Both ends of each channel are cut alike: gradients of tied parameters come last.
    """

    def is_end(instruction: Instruction) -> bool:
        match instruction:
            case Send(value) | Receive(value):
                return isinstance(value, TiedGradient)
        return isinstance(instruction, AddTied | Reduce | Step)

    passes = tuple(tuple(x for x in each if not is_end(x)) for each in programs)
    ends = tuple(tuple(x for x in each if is_end(x)) for each in programs)
    return passes, ends


class Batches:
    """Cuts batches, weighs micro-batches, and compares samples between stages."""

    def __init__(
        self,
        stages: LocalStages,
        cut_batch: CutBatch | None,
        *,
        weigh: WeighName | Weigh,
    ) -> None:
        self._stages = stages
        self._samples = _compare_samples(stages)
        self._modules = [m for _, layer in stages.layers() for m in layer.modules()]
        self._cut_batch = cut_batch
        self._weigh = find_weigh(weigh)
        self._adds = weigh == "sum"
        for executor in stages.executors.values():
            executor.stage.loss.adds = self._adds

    def pair(self, inputs: Batch, targets: Batch) -> tuple[Batch, Batch]:
        """Return inputs and targets of a batch that may come as one object."""
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
        call: MicroBatches,
        *,
        part: StepPart | None = None,
        reads_targets: bool = True,
        key: Any = None,
    ) -> None:
        """Give the stages a batch, cut, for a call that has no batch yet."""
        transport = self._stages.transport
        forwards = "evaluate" if reads_targets else "predict"
        transport.doing = f"step {call.step}" if call.training else forwards
        inputs, targets = self.pair(inputs, targets)
        try:
            if call.training:
                check_hooks(self._modules)
            batch = self._cut(inputs, targets, call, reads_targets=reads_targets)
            total = self._total(batch, part)
            if call.training and self._samples is not None:
                self._samples.note(inputs, targets, key, is_first=not call.first)
        except RequestError as error:
            transport.report(error, ends=False)
            raise
        peers = transport.peers
        if call.training and peers.sum_dims() and not self._adds:
            counts = batch.weights is not None and peers.counts_losses
            weight = sum(batch.weights or []) if counts else 0.0
            numbers = torch.tensor([weight], dtype=torch.float64)
            total = partial(_number, transport.sum_numbers(numbers))
        for executor in self._stages.executors.values():
            executor.begin(replace(batch, total=total))

    def _cut(
        self, inputs: Batch, targets: Batch, call: MicroBatches, *, reads_targets: bool
    ) -> MicroBatches:
        """Cut the parts of a batch that this process reads."""
        m = call.n_microbatches
        n_inputs = None
        if self._stages.has_first:
            n_inputs = samples_to_cut(inputs)
            call = replace(call, inputs=split_inputs(inputs, m), n_inputs=n_inputs)
        if self._stages.has_last and reads_targets:
            cut_targets = split_targets(targets, m)
            n_targets = samples_to_cut(targets)
            check_samples(n_inputs, n_targets)
            call = replace(
                call,
                targets=cut_targets,
                weights=weights_of(self._weigh, cut_targets),
                n_targets=n_targets,
            )
        return call

    def _total(
        self, batch: MicroBatches, part: StepPart | None
    ) -> Callable[[], float] | None:
        """Return the weight of the step, where this process knows it."""
        if self._adds:
            return partial(float, 1.0)
        if part is None or batch.weights is None:
            return None
        return partial(float, part.total(sum(batch.weights)))


def _compare_samples(stages: LocalStages) -> SameSamples | None:
    """Compare samples in every step, where processes read different batches."""
    peers, stage_of = stages.transport.peers, stages.first.stage_of
    is_one_stage = stage_of[0] == stage_of[-1] and "tp" not in peers.coordinates
    if stages.transport.is_local or is_one_stage:
        return None
    stage, ends = stages.first.stage, (stages.has_first, stages.has_last)
    parameters = (p for *_, p in stage.named_stepped())
    samples = SameSamples(peers, ends, parameters, stage.device)
    stages.first.optimizer.samples = samples
    return samples


def _number(total: Reduction) -> float:
    return float(total.result())
