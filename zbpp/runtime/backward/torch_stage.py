"""Our split backward under torch's pipeline schedules.

>>> from torch import nn
>>> from zbpp.runtime.backward.torch_stage import SplitModule
>>> module = SplitModule(nn.Linear(4, 4))

and then ``PipelineStage(module, ..., dw_builder=module.dw_builder)``: when torch runs
the module's backward, only B runs, and what ``dw_builder`` returns is W.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.backward.self_check import check_split
from zbpp.runtime.backward.split import SplitGraph, split_forward
from zbpp.runtime.support.autograd_internals import accumulates
from zbpp.runtime.support.pytree import map_tensors, tensors_in


class _RunB(torch.autograd.Function):
    """The outputs of a split forward; the backward is B."""

    @staticmethod
    def forward(
        ctx: Any,
        graph: SplitGraph,
        owner: "SplitModule",
        outputs: list[Tensor],
        anchor: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.graph, ctx.owner = graph, owner
        return tuple(y.detach() for y in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if not accumulates():  # torch's pipeline infers shapes
            input_gradients = ctx.graph.input_gradients(gradients)
        else:
            input_gradients = ctx.graph.backward_input(gradients)
            ctx.owner.left.append(ctx.graph)
        return (None, None, None, None, *input_gradients)


class SplitModule(nn.Module):
    """Runs a module; its backward leaves W to `dw_builder`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        check_split()
        self.module = module
        self.left: list[SplitGraph] = []
        """Graphs after B and before `dw_builder`, in the order of B."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        graph = split_forward(self.module, *args, **kwargs)
        inputs, result = _trainable((args, kwargs)), graph.outputs
        graph.outputs = None  # the caller alone decides how long they live
        outputs = _trainable(result)
        if not outputs:
            return result
        # Without it, a first stage's outputs would seem to need no gradient.
        anchor = torch.zeros((), requires_grad=True)
        run_b: Any = _RunB.apply  # typed from torch 2.14 on
        joined = run_b(graph, self, outputs, anchor, *inputs)
        rest = iter(joined)
        return map_tensors(result, lambda y: next(rest) if y.requires_grad else y)

    def dw_builder(self) -> Callable[[], None]:
        """Return W of all backwards since the last call.

        torch calls it after each backward, so it is W of one micro-batch.
        """
        graphs, self.left = self.left, []

        def run_w() -> None:
            for graph in graphs:
                graph.backward_weight()

        return run_w

    def __getstate__(self) -> dict[str, Any]:
        """Copy no graphs, as torch copies no gradients of parameters."""
        return {**vars(self), "left": []}


def _trainable(thing: Any) -> list[Tensor]:
    """All tensors in it that require a gradient."""
    return [tensor for tensor in tensors_in(thing) if tensor.requires_grad]
