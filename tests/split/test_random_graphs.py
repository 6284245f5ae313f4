"""Random modules: B then W is the full backward, to the bit, whatever the graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from split_runs import check, random_order
from torch import Tensor, nn
from torch.nn import functional as f
from torch.utils.checkpoint import checkpoint
from zoo import Case, Fn, Square, features, lin

pytestmark = pytest.mark.filterwarnings("ignore:.* gains little here")
WIDTH, N_WEIGHTS = 6, 3

# Each takes the module, two values of (3, 4, 6), and one of a few shared weights.
PRODUCTS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda m, x, z, w: f.linear(x, w, m.bias),
    "linear, no bias": lambda m, x, z, w: f.linear(x, w),
    "matmul": lambda m, x, z, w: x @ w,
    "matmul, transposed": lambda m, x, z, w: x @ w.t(),
    "einsum": lambda m, x, z, w: torch.einsum("bsi,ij->bsj", x, w),
    "bmm": lambda m, x, z, w: torch.bmm(x, w.expand(3, -1, -1)),
    "addmm": lambda m, x, z, w: torch.addmm(
        m.bias, x.flatten(0, 1), w, alpha=0.5
    ).view_as(x),
    "conv": lambda m, x, z, w: f.conv1d(
        x.transpose(1, 2), w[..., None], m.bias
    ).transpose(1, 2),
    "lora": lambda m, x, z, w: f.linear(x, w.detach() + m.up @ m.down),
    "parts": lambda m, x, z, w: torch.cat([x @ part for part in w.chunk(2, 1)], -1),
    "one transpose": lambda m, x, z, w: (
        (x @ (t := w.t())) + f.pad(x @ t[:, :2], (0, 4))
    ),
}
OTHERS: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "attention": lambda m, x, z, w: (x @ z.transpose(1, 2)).softmax(-1) @ z,
    "norm": lambda m, x, z, w: f.layer_norm(x, (WIDTH,), m.bias),
    "scale": lambda m, x, z, w: x * w[0],
    "tanh": lambda m, x, z, w: x.tanh(),
    "add": lambda m, x, z, w: x + z,
    "gate": lambda m, x, z, w: x * z.sigmoid(),
    "in place": lambda m, x, z, w: (x + 0).relu_(),
    "dropout": lambda m, x, z, w: f.dropout(x, 0.3),
    "view": lambda m, x, z, w: x.flatten(0, 1).unflatten(0, (3, 4)),
    "slice": lambda m, x, z, w: torch.cat((x[:, 1:], z[:, :1]), 1),
    "square": lambda m, x, z, w: Square.apply(x.tanh()),
    "cut": lambda m, x, z, w: x.detach() + z,
}
STEPS = PRODUCTS | OTHERS
Step = tuple[str, int, int, int]


class Random(nn.Module):
    """Steps over a growing list of values; some stretches are checkpointed."""

    def __init__(self, parts: list[tuple[bool, list[Step]]], frozen: list[int]) -> None:
        super().__init__()
        self.parts = parts
        self.weights = nn.ParameterList(
            torch.randn(WIDTH, WIDTH) / 2 for _ in range(N_WEIGHTS)
        )
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.down = nn.Parameter(torch.randn(2, WIDTH))
        self.up = nn.Parameter(torch.randn(WIDTH, 2))
        for i in frozen:
            self.weights[i].requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = [x]
        for is_checkpointed, steps in self.parts:
            run = self._run if not is_checkpointed else self._run_checkpointed
            values = [*values[-2:], *run(steps, *values)]
        return values[-1], values[len(values) // 2]

    def _run(self, steps: list[Step], *values: Tensor) -> tuple[Tensor, ...]:
        made = list(values)
        for name, i, j, k in steps:
            x, z = made[-1 - i % len(made)], made[-1 - j % len(made)]
            made.append(STEPS[name](self, x, z, self.weights[k]))
        return tuple(made[len(values) :])

    def _run_checkpointed(
        self, steps: list[Step], *values: Tensor
    ) -> tuple[Tensor, ...]:
        return checkpoint(self._run, steps, *values, use_reentrant=False)


# One weight is used often, and half of the steps are products: those that are used
# three times or more are the ones that are easily added up in a wrong order.
STEP = st.tuples(
    st.one_of(st.sampled_from(sorted(PRODUCTS)), st.sampled_from(sorted(STEPS))),
    st.sampled_from([0, 0, 0, 1, 2]),
    st.integers(0, 3),
    st.sampled_from([0, 0, 0, *range(1, N_WEIGHTS)]),
)
PART = st.tuples(st.booleans(), st.lists(STEP, min_size=2, max_size=6))


@given(
    parts=st.lists(PART, min_size=1, max_size=3),
    frozen=st.lists(st.integers(0, N_WEIGHTS - 1), max_size=1),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_random_graphs_split_to_the_bit(
    parts: list[tuple[bool, list[Step]]],
    frozen: list[int],
    seed: int,
    dtype: torch.dtype,
) -> None:
    case = Case(lambda: Random(parts, frozen), "")
    check(case, dtype=dtype, orders=(random_order(seed, 4),))


def use_first_as_often(m: Any, value: tuple[Tensor, Tensor]) -> Tensor:
    """Use the first weight once, twice or not at all."""
    x, n = value
    for _ in range(int(n)):
        x = m.first(x).tanh()
    return m.last(x)


@given(
    uses=st.lists(st.integers(0, 2), min_size=5, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_sums_do_not_depend_on_the_order_of_passes(uses: list[int], seed: int) -> None:
    """Micro-batches may use a weight otherwise than those before."""
    case = Case(
        lambda: Fn(use_first_as_often, first=lin(), last=lin()),
        "last.weight",
        lambda i: (features(i)[0] * 10.0**i, torch.tensor([uses[i]])),
    )
    check(case, orders=tuple(random_order(seed + i, 5) for i in range(3)))
