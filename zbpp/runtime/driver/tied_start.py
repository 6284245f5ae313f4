"""Before the first step: copies of a tied parameter get equal bits and options."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zbpp.core import RequestError, Step, TiedGradient
from zbpp.runtime.executor import Executor
from zbpp.runtime.optim.rollback import copy_groups
from zbpp.runtime.ties.plan import TiePlan

__all__ = ["check_tied", "describe_tied", "share_first_bits"]

Description = Mapping[tuple[int, int], str]
"""Of a tied parameter and its optimizer's options, by (tie, stage)."""


@torch.no_grad()
def share_first_bits(executors: Mapping[int, Executor], plan: TiePlan) -> None:
    """Give all stages the tied parameters of those that hold their first layers.

    All processes that hold a tie must call.
    """
    for tie, chunks in enumerate(plan.chunks):
        first, *others = plan.stages(tie)
        value = TiedGradient(tie, chunks[0])
        if first in executors:
            # A copy: the first step, or a load, may write before it has left.
            held = executors[first].stage.ties.held[tie].parameter.detach().clone()
            for peer in others:
                executors[first].transport.send(value, (held,), peer)
        for stage in others:
            if stage in executors:
                transport = executors[stage].transport
                copy = executors[stage].stage.ties.held[tie].parameter
                transport.post(value, first, (copy.detach(),))
                copy.copy_(transport.receive(value, Step(stage))[0])


def describe_tied(executors: Mapping[int, Executor]) -> Description:
    """Describe the tied parameters of this process for `check_tied`."""
    return {
        (number, stage): _describe(executor, tie.parameter)
        for stage, executor in executors.items()
        for number, tie in executor.stage.ties.held.items()
    }


def _describe(executor: Executor, parameter: Tensor) -> str:
    frozen = "" if parameter.requires_grad else "frozen, "
    text = f"{frozen}{tuple(parameter.shape)} {parameter.dtype}"
    for optimizer in executor.optimizer.optimizers.all:
        groups = zip(optimizer.param_groups, copy_groups(optimizer), strict=True)
        for group, options in groups:
            if any(p is parameter for p in group["params"]):
                text += f", {type(optimizer).__name__} with {sorted(options.items())}"
    return text


def check_tied(plan: TiePlan, descriptions: Sequence[Description]) -> None:
    """Compare what `describe_tied` has given in all processes.

    Raises:
        RequestError: a parameter differs, or is stepped in another way on a stage.
    """
    for tie in range(len(plan.ties)):
        by_stage = {
            stage: text
            for part in descriptions
            for (number, stage), text in part.items()
            if number == tie
        }
        if len(set(by_stage.values())) > 1:
            texts = "; ".join(f"stage {s}: {by_stage[s]}" for s in sorted(by_stage))
            raise RequestError(
                f"the tied parameter {plan.name(tie)} must be stepped alike on all "
                f"stages that hold it, but there is {texts}: let the optimizer's "
                "builder give its copies equal options"
            )
