"""Hand the batch of a step to the stages that read it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from zbpp.core import Placement, RequestError
from zbpp.runtime.backward.data_parallel import check_hooks
from zbpp.runtime.comm.stage_group import StageGroup
from zbpp.runtime.comm.transport import Reduction
from zbpp.runtime.driver.agreement import check_first_step
from zbpp.runtime.executor import Executor
from zbpp.runtime.loss import LossFn
from zbpp.runtime.microbatches import (
    Batch,
    CutBatch,
    Weigh,
    WeighName,
    check_filled,
    check_samples,
    find_weigh,
    repeat_first,
    samples_to_cut,
    split_inputs,
    split_targets,
)
from zbpp.runtime.optim.same_samples import SameSamples
from zbpp.runtime.support.pytree import map_tensors
from zbpp.runtime.values import mapped

__all__ = ["Batches", "StepPart"]


@dataclass
class StepPart:
    """The call that runs now, of several that add up to one step.

    Args:
        n_microbatches: of each call.
        n_calls: of the step.
        n_done: calls before this one.
        weight: of each call; None: this process does not know it.
    """

    n_microbatches: int
    n_calls: int
    n_done: int = 0
    weight: float | None = None

    @property
    def first(self) -> int:
        """Micro-batches of the calls before this one."""
        return self.n_done * self.n_microbatches

    def total(self, weight: float) -> float:
        """Return the weight of all calls from that of this one.

        Raises:
            RequestError: an earlier call had another weight.
        """
        self.weight = weight if self.weight is None else self.weight
        if weight != self.weight:
            raise RequestError(
                f"the batch of this forward_backward() weighs {weight:g}, and that of "
                f"the first one {self.weight:g}; give calls before one optim_step() "
                'equal batches, or a loss that is a sum (reduction="sum")'
            )
        return weight * self.n_calls


class Batches:
    """Cuts batches, weighs micro-batches, and compares what belongs together.

    Args:
        executors: of this process, by stage.
        placement: of the chunks.
        cut_batch: makes inputs and targets of a batch that is given as one.
        weigh: `find_weigh` says what it may be; None: samples.

    Raises:
        RequestError: weigh is none of what it may be.
    """

    def __init__(
        self,
        executors: Mapping[int, Executor],
        placement: Placement,
        cut_batch: CutBatch | None = None,
        *,
        weigh: WeighName | Weigh | None = None,
    ) -> None:
        self._executors = executors
        self._first, self._last = placement.stage_of[0], placement.stage_of[-1]
        self._transport = next(iter(executors.values())).transport
        self._has_compared = False
        peers = self._transport.peers
        self._samples = self._compare_samples()
        self._late = [
            _LateParameters(executor, peers) for executor in executors.values()
        ]
        self._cut_batch = cut_batch
        self._weigh = find_weigh(weigh or "samples")
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
        """Begin a step or an evaluation: give the stages the micro-batches they read.

        Args:
            inputs: for the first chunk.
            targets: for the last.
            step: its number.
            n_microbatches: how many to cut the batch into.
            training: it is a step.
            predicts: leave targets and loss out, and keep the outputs.
            keeps_outputs: keep them beside the loss.
            part: of a step that is taken behind several calls; None: it is whole.
            loss_fn: of this call; None: the usual one.
            key: numbers of the samples.

        Raises:
            RequestError: a batch is missing, or cannot be cut so; or a parameter came
                into a layer that nobody would train.
        """
        m = n_microbatches
        call = "predict" if predicts else "evaluate"
        self._transport.doing = f"step {step}" if training else call
        cut_inputs: Any = None
        cut_targets: Any = None
        weights = n_filled = part_total = None
        try:
            for late in self._late if training else ():
                late.check()
            if self._first in self._executors:
                cut_inputs = split_inputs(inputs, m)
                n_filled = len(cut_inputs)
            if self._last in self._executors and not predicts:
                cut_targets = split_targets(targets, m)
                weights = [self._weigh(target) for target in cut_targets]
                weights += [0.0] * (m - len(weights))
                if part is not None and not self._adds:
                    part_total = part.total(sum(weights))
            if training and not self._has_compared:
                check_first_step(self._executors, self.samples(inputs, targets))
                self._has_compared = True
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
        if self._transport.peers.n > 1:
            # Replicas run the same passes: layers may communicate within them.
            if cut_inputs is not None:
                cut_inputs = repeat_first(cut_inputs, m, mapped)
            if cut_targets is not None:
                cut_targets = repeat_first(cut_targets, m, map_tensors)
        total = None
        if training and weights is not None and not self._adds:
            weight = torch.tensor([sum(weights)], dtype=torch.float64)
            total = self._transport.add_over_replicas(weight)
        whole = None if total is None else partial(_number, total)
        if self._adds:
            whole = partial(float, 1.0)
        elif part_total is not None:
            whole = partial(float, part_total)
        for stage, executor in self._executors.items():
            executor.begin(
                step=step,
                inputs=cut_inputs if stage == self._first else None,
                targets=cut_targets if stage == self._last else None,
                n_microbatches=m,
                n_inputs=n_inputs,
                n_targets=n_targets,
                n_filled=n_filled,
                training=training,
                weights=weights if stage == self._last else None,
                total=whole,
                is_part=part is not None,
                first=0 if part is None else part.first,
                loss_fn=loss_fn,
                keeps_outputs=predicts or keeps_outputs,
            )

    def samples(self, inputs: Batch, targets: Batch) -> tuple[int | None, int | None]:
        """Samples of inputs and targets where this process reads them, else None."""
        return (
            samples_to_cut(inputs) if self._first in self._executors else None,
            samples_to_cut(targets) if self._last in self._executors else None,
        )

    def _compare_samples(self) -> SameSamples | None:
        """Let every step compare samples, if processes could be given other ones."""
        peers, transport = self._transport.peers, self._transport
        has_neighbours = "tp" in peers.place
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


class _LateParameters:
    """Notices parameters that are put into layers after the pipeline was built.

        layer.weight = nn.Parameter(...)    the optimizer steps the one before

    Optimizers, sums over replicas and norms hold the parameters of the start. One that
    comes later would be trained by nobody, without a word.

    Args:
        executor: of the stage.
        peers: processes of the stage.
    """

    def __init__(self, executor: Executor, peers: StageGroup) -> None:
        self._executor = executor
        self._has_peers = peers.n > 1
        stage = executor.stage
        both = (*stage.named_leaves(), *stage.named_stepped())
        self._held: set[Tensor] = {p for *_, p in both}
        self._look()

    def check(self) -> None:
        """Compare what the layers hold now; in C, as every step does so.

        Raises:
            RequestError: it names the parameters that nobody would train; or a module
                has a deprecated backward hook.
        """
        check_hooks(self._modules)
        now = chain.from_iterable(map(dict.values, self._tables))
        if sum(map(len, self._tables)) == len(self._seen) and all(
            map(is_, now, self._seen)
        ):
            return
        trained = self._trained()
        late = [
            name
            for _, name, p in self._executor.stage.named_leaves()
            if p.requires_grad and p not in trained
        ]
        if late:
            raise RequestError(
                f"{', '.join(late[:3])}{', ...' if len(late) > 3 else ''} was put into "
                "its layer after the pipeline was built, so nothing would train it; "
                "write into the parameter that was there (with torch.no_grad(): "
                "p.copy_(...)), or build a new Pipeline"
            )
        self._look()

    def _trained(self) -> set[Tensor]:
        """The parameters of the start; without peers, also those of the optimizers."""
        if self._has_peers:
            return self._held
        return self._held | set(self._executor.optimizer.optimizers.parameters())

    def _look(self) -> None:
        """Remember the parameters and the modules of each module."""
        self._modules: list[Any] = [
            module
            for _, layer in self._executor.stage.numbered()
            for module in layer.modules()
        ]
        self._tables: list[dict[str, Any]] = [
            table for x in self._modules for table in (x._parameters, x._modules)
        ]
        self._seen = tuple(chain.from_iterable(map(dict.values, self._tables)))
