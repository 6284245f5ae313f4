"""Before the first split of a process: is a split backward a plain one, to the bit?

What torch does not document may change in a release that nobody has tried (see
`private_names`). A small network then tells, in milliseconds, and nobody trains wrong.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from zbpp.core import RequestError
from zbpp.runtime.backward.split import run_forward

__all__ = ["check_split"]

_SIZE = 4
_NAMES = ("the input", "a weight", "its bias", "a weight that is used twice", "a scale")


@cache
def check_split() -> None:
    """Compare B and W, and a full backward, with autograd's.

    Raises:
        RequestError: a gradient differs.
    """
    with torch.enable_grad():
        expected = _gradients(None)
        for joint in (True, False):
            found = _gradients(joint)
            for name, ours, theirs in zip(_NAMES, found, expected, strict=True):
                if ours is None or theirs is None or not torch.equal(ours, theirs):
                    raise RequestError(
                        f"torch {torch.__version__} is not split right: the gradient "
                        f"of {name} is not that of a plain backward, and a training "
                        "would be wrong; take a torch that is tested (`zbpp doctor`)"
                    )


def _gradients(joint: bool | None) -> list[Tensor | None]:
    """Those of the leaves; by a full backward of ours, by B and W, or (None) autograd.

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
        hidden = F.gelu(F.linear(x, leaves[1], leaves[2]))
        twice = F.linear(F.linear(hidden, leaves[3]), leaves[3])
        return x + F.layer_norm(twice, (n,), leaves[4])

    given = numbers[: n * n].view(n, n)
    if joint is None:
        total = (network(leaves[0]) * given).sum()  # a given gradient imports sympy
        torch.autograd.backward(total)
        return [leaf.grad for leaf in leaves]
    graph = run_forward(network, (leaves[0],), {})
    if joint:
        (dx,) = graph.backward(given)
    else:
        (dx,) = graph.backward_input(given)
        graph.backward_weight()
    return [dx, *(leaf.grad for leaf in leaves[1:])]
