"""Compare a split backward with a plain one before the first split of a process.

Private parts of torch (see `private_names`) may change in a new release. A small
network finds out in milliseconds, before a training gets wrong gradients.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from zbpp.core import RequestError
from zbpp.runtime.backward.split import split_forward

_SIZE = 4
_NAMES = ("the input", "a weight", "its bias", "a weight that is used twice", "a scale")


@cache
def check_split() -> None:
    """Compare B and W, and a full backward, with autograd's.

    Raises:
        RequestError: a gradient differs.
    """
    with torch.enable_grad():
        expected = _gradients("autograd")
        for way in ("BW", "B and W"):
            for name, ours, plain in zip(
                _NAMES, _gradients(way), expected, strict=True
            ):
                if ours is None or plain is None or not torch.equal(ours, plain):
                    raise RequestError(
                        f"torch {torch.__version__} is not split right: the gradient "
                        f"of {name} is not that of a plain backward, and a training "
                        "would be wrong; take a torch that is tested (`zbpp doctor`)"
                    )


def _gradients(way: str) -> list[Tensor | None]:
    """Compute the gradients of the leaves of a small network.

    It draws no random numbers, and does not depend on the user's defaults.
    """
    n = _SIZE
    numbers = torch.linspace(
        -1, 1, 3 * n * n + 2 * n, dtype=torch.float32, device="cpu"
    )
    x, a, c, bias, scale = torch.split(numbers.cos(), [n * n, n * n, n * n, n, n])
    leaves = [x.view(n, n), a.view(n, n), bias, c.view(n, n), scale]
    x, a, bias, c, scale = leaves = [x.clone().requires_grad_() for x in leaves]
    dy = numbers[: n * n].view(n, n)

    def network(x: Tensor) -> Tensor:
        hidden = functional.gelu(functional.linear(x, a, bias))
        twice = functional.linear(functional.linear(hidden, c), c)
        return x + functional.layer_norm(twice, (n,), scale)

    if way == "autograd":
        total = (network(x) * dy).sum()  # backward(dy) would import sympy
        torch.autograd.backward(total)
        return [leaf.grad for leaf in leaves]
    graph = split_forward(network, x)
    run_b = graph.backward if way == "BW" else graph.backward_input
    (dx,) = run_b(dy)
    graph.backward_weight()
    return [dx, *(leaf.grad for leaf in leaves[1:])]
