"""One compiled pass over p, g, m and v that writes Adam's new p, and nothing else.

    g  <- g + decay p                        (Adam) or   p <- (1 - lr decay) p   (AdamW)
    m' = m + (1 - beta1) (g - m)
    v' = beta2 v + (1 - beta2) g g
    p  <- p - lr / (1 - beta1^t) m' / (sqrt(v') / sqrt(1 - beta2^t) + eps)

Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2. `torch.compile`
makes it for any device that it knows; a CPU needs a C++ compiler.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zbpp.runtime.optim.rollback.buckets import ROW
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.torch_internals import compiled, multiply_add

__all__ = ["NoKernel", "adam_kernel", "adam_numbers", "is_coupled"]

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


class NoKernel(RuntimeError):
    """Parameters cannot be stepped alone here; the text says why."""


def adam_kernel(
    device: torch.device, dtype: torch.dtype, values: Mapping[str, Any]
) -> Kernel:
    """Compile a step for matrices ``(rows, 64)`` with any number of rows.

    Args:
        device: where all tensors are.
        dtype: of p, g, m and v; everything between is at least fp32.
        values: of a parameter group.

    Returns:
        A function of p, g, m, v and `adam_numbers`.

    Raises:
        NoKernel: it cannot be compiled.
    """
    return _compile(device, dtype, is_coupled(values), 1 - values["betas"][0] < 0.5)


def adam_numbers(values: Mapping[str, Any], count: float, like: Tensor) -> Tensor:
    """Factors that all numbers of a parameter share, after ``count`` steps of it."""
    lr, decay, (beta1, beta2) = values["lr"], values["weight_decay"], values["betas"]
    numbers = torch.tensor(
        [
            decay if is_coupled(values) else 1 - lr * decay,
            1 - beta1,
            beta2,
            1 - beta2,
            (1 - beta2 ** (count + 1)) ** 0.5,
            values["eps"],
            lr / (1 - beta1 ** (count + 1)),
        ],
        dtype=torch.promote_types(like.dtype, torch.float32),
        pin_memory=runs_ahead(like.device),
    )
    return numbers.to(like.device, non_blocking=True)


def is_coupled(values: Mapping[str, Any]) -> bool:
    """True if weight decay is a part of the gradient."""
    return not values.get("decoupled_weight_decay") and values["weight_decay"] != 0


@cache
def _compile(
    device: torch.device, dtype: torch.dtype, coupled: bool, near_mean: bool
) -> Kernel:
    """The formula; ``near_mean``: m' is nearer to m than to g, see `torch.lerp`."""
    try:
        step = _formula(coupled=coupled, near_mean=near_mean)
        values = {"lr": 0.1, "weight_decay": 0.0, "betas": (0.9, 0.9), "eps": 0.1}
        matrices = [torch.zeros(2, ROW, device=device, dtype=dtype) for _ in range(4)]
        return compiled(step, (*matrices, adam_numbers(values, 0, matrices[0])))
    except (RuntimeError, OSError, ImportError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise NoKernel(f"its step cannot be compiled: {reason[0]}") from error


def _formula(*, coupled: bool, near_mean: bool) -> Kernel:
    multiply_add_ = multiply_add()

    def step(p: Tensor, g: Tensor, m: Tensor, v: Tensor, numbers: Tensor) -> None:
        decay, rate, beta2, rest, root, eps, size = numbers.unbind()
        old, gradient, mean, square = (t.to(numbers.dtype) for t in (p, g, m, v))
        if coupled:
            gradient = multiply_add_(decay, old, gradient)
        else:
            old = old * decay
        base, part = (mean, rate) if near_mean else (gradient, rate - 1)
        mean = multiply_add_(gradient - mean, part, base)
        square = multiply_add_(rest * gradient, gradient, beta2 * square)
        p.copy_(old - size * mean / (square.sqrt() / root + eps))

    return step
