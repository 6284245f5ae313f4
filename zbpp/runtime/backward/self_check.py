"""Before the first split of a process: is a split backward a plain one, to the bit?

What torch does not document may change in a release that nobody has tried (see
`private_names`). A small network then tells, in milliseconds, and nobody trains wrong.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from zbpp.core import RequestError
from zbpp.runtime.backward.split import run_forward

__all__ = ["check_split"]

_SIZE = 4
_Network = Callable[[Tensor], Tensor]
_Backward = Callable[[_Network, Tensor, Tensor], Tensor | None]
"""From a network, its input and the gradient of its output to that of the input."""

_NAMES = ("the input", "a weight", "its bias", "a weight that is used twice", "a scale")


@cache
def check_split() -> None:
    """Compare B and W, and a full backward, with autograd's.

    Raises:
        RequestError: a gradient differs.
    """
    with torch.enable_grad():
        expected = _gradients(_by_autograd)
        for backward in (_in_one_piece, _as_b_and_w):
            gradients = _gradients(backward)
            for name, ours, theirs in zip(_NAMES, gradients, expected, strict=True):
                if ours is None or theirs is None or not torch.equal(ours, theirs):
                    raise RequestError(
                        f"torch {torch.__version__} is not split right: the gradient "
                        f"of {name} is not that of a plain backward, and a training "
                        "would be wrong; take a torch that is tested (`zbpp doctor`)"
                    )


def _gradients(backward: _Backward) -> list[Tensor | None]:
    """Compute the gradients of the leaves of a small network.

    Two products, one of them twice, a normalisation, a residual: no random number is
    drawn, and nothing depends on the user's defaults.
    """
    n = _SIZE
    numbers = torch.linspace(
        -1, 1, 3 * n * n + 2 * n, dtype=torch.float32, device="cpu"
    )
    x, a, c, bias, scale = torch.split(numbers.cos(), [n * n, n * n, n * n, n, n])
    leaves = [x.view(n, n), a.view(n, n), bias, c.view(n, n), scale]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]

    def network(x: Tensor) -> Tensor:
        hidden = functional.gelu(functional.linear(x, leaves[1], leaves[2]))
        twice = functional.linear(functional.linear(hidden, leaves[3]), leaves[3])
        return x + functional.layer_norm(twice, (n,), leaves[4])

    dx = backward(network, leaves[0], numbers[: n * n].view(n, n))
    return [dx, *(leaf.grad for leaf in leaves[1:])]


def _by_autograd(network: _Network, x: Tensor, dy: Tensor) -> Tensor | None:
    total = (network(x) * dy).sum()  # a gradient that is given imports sympy
    torch.autograd.backward(total)
    return x.grad


def _in_one_piece(network: _Network, x: Tensor, dy: Tensor) -> Tensor | None:
    (dx,) = run_forward(network, (x,), {}).backward(dy)
    return dx


def _as_b_and_w(network: _Network, x: Tensor, dy: Tensor) -> Tensor | None:
    graph = run_forward(network, (x,), {})
    (dx,) = graph.backward_input(dy)
    graph.backward_weight()
    return dx
