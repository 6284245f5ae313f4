"""B and W as two calls, for any module; this file knows nothing of pipelines.

A Linear's backward is two matmuls. Autograd runs both; here B runs the first, keeps
the operands of the second in a queue, and W runs the queue:

    F   y  = x w^T + b
    B   dx = dy w,  db = sum(dy)      keeps (x, dy)
    W   w.grad += dy^T x              drops them

All other parameters (norms, biases, embeddings) get their gradients in B. The weight
gradient is computed by the same matmul as autograd's, then added, so that a split
backward and ``loss.backward()`` agree to the last bit.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DeferredLinear", "WeightQueue", "accumulate", "defer_linears"]


class WeightQueue:
    """Weight-gradient work of one micro-batch, left by B for W."""

    def __init__(self) -> None:
        self._work: dict[Tensor, list[Callable[[], Tensor]]] = {}
        self.began_s = 0.0
        """`time.perf_counter` when the pass that runs now began, for emulation."""

    def __len__(self) -> int:
        return sum(len(calls) for calls in self._work.values())

    def defer(self, parameter: Tensor, compute: Callable[[], Tensor]) -> None:
        """Keep a call for W; it returns a part of the parameter's gradient."""
        self._work.setdefault(parameter, []).append(compute)

    @torch.no_grad()
    def run(self) -> None:
        """Make all calls, add up each parameter's parts, and forget them.

        Like autograd, the parts of one backward are summed first (in the order in
        which B came to them), and the sum is then added to ``.grad``. Operands are
        freed as W proceeds.
        """
        self.began_s = time.perf_counter()
        for parameter in list(self._work):
            first, *others = self._work.pop(parameter)
            gradient = first()
            for compute in others:
                gradient = gradient + compute()
            accumulate(parameter, gradient)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Let the deferring modules that run inside (forward or recompute) use me.

        A plain global, not a context variable: on a GPU autograd recomputes
        checkpointed blocks in a thread of its own.
        """
        global _current
        before, _current = _current, self
        self.began_s = time.perf_counter()
        try:
            yield
        finally:
            _current = before


_current: WeightQueue | None = None


def current_queue() -> WeightQueue | None:
    """The queue of the pass that runs now, if its weight gradients are deferred."""
    return _current


def accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to ``parameter.grad`` as autograd does: the first gradient is kept as it is.

    Args:
        parameter: a leaf.
        gradient: of the same shape; cast to the parameter's dtype.
    """
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


class _Linear(torch.autograd.Function):
    """``x w^T + b`` whose backward leaves the weight gradient in a queue."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        parameter: Tensor,
        queue: WeightQueue,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = parameter
        ctx.queue = queue
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        parameter, queue = ctx.parameter, ctx.queue
        rows = dy.reshape(-1, dy.shape[-1])
        columns = x.reshape(-1, x.shape[-1])
        queue.defer(parameter, lambda: rows.t().mm(columns))
        dx = (rows.mm(weight)).view(x.shape) if ctx.needs_input_grad[0] else None
        db = rows.sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db, None, None


class DeferredLinear(nn.Linear):
    """A Linear that leaves its weight gradient for W while a queue records.

    Anywhere else it is a plain `torch.nn.Linear`. Same parameters, same state dict.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to ``(..., in_features)``."""
        queue = _current
        if queue is None or not (torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(input)
        x = input
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        with torch.autocast(device, enabled=False):
            y: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
                x, weight, bias, self.weight, queue
            )
        return y


def defer_linears(modules: Iterable[nn.Module]) -> int:
    """Make the Linears in these modules defer; return how many.

    Only plain `torch.nn.Linear` modules change class: a subclass may compute anything.
    A weight that two modules share is left to B: its gradient would otherwise be
    summed in an order that depends on the schedule.
    """
    found = [module for layer in modules for module in layer.modules()]
    uses = Counter(
        id(parameter)
        for module in dict.fromkeys(found)
        for parameter in module._parameters.values()
        if parameter is not None
    )
    count = 0
    for module in dict.fromkeys(found):
        if type(module) is nn.Linear and uses[id(module.weight)] == 1:
            module.__class__ = DeferredLinear
        count += isinstance(module, DeferredLinear)
    return count
