"""Without exact sums, W adds a weight gradient within the product's own kernel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zbpp.runtime import SplitGraph


class Calls(TorchDispatchMode):
    """Notes the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def run(module: Any, inputs: list[Tensor], *, is_exact: bool) -> list[list[str]]:
    """Accumulate over the inputs; return what W called for each."""
    called = []
    for x in inputs:
        y = module(x)
        graph = SplitGraph([y], is_exact=is_exact)
        graph.backward_input(torch.ones_like(y))
        with Calls() as calls:
            graph.backward_weight()
        called.append(calls.names)
    return called


def gradients(module: nn.Module) -> list[Tensor]:
    found = []
    for p in module.parameters():
        assert p.grad is not None
        found.append(p.grad)
        p.grad = None
    return found


def linear() -> nn.Module:
    return nn.Linear(700, 20)


class Times(nn.Module):
    """A weight on one side of a product."""

    def __init__(self, shape: tuple[int, ...], *, left: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.left = left

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        if x.dim() == 3:
            return torch.bmm(x, self.weight)
        return self.weight @ x if self.left else x @ self.weight


CASES: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (linear, (600, 700)),
    (lambda: nn.Linear(700, 20, bias=False), (600, 700)),
    (lambda: Times((700, 20), left=False), (600, 700)),
    (lambda: Times((20, 600), left=True), (600, 700)),
    (lambda: Times((3, 700, 20), left=False), (3, 600, 700)),
]


@pytest.mark.parametrize(("build", "shape"), CASES)
def test_the_second_gradient_is_added_by_the_product(
    build: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    module = build()
    inputs = [torch.randn(shape) for _ in range(3)]
    first, *rest = run(module, inputs, is_exact=False)
    assert not {"addmm_", "baddbmm_"}.intersection(first)
    for names in rest:
        assert {"addmm_", "baddbmm_"}.intersection(names)
        assert not {"mm", "bmm", "add_"}.intersection(names)
    loose = gradients(module)
    for names in run(module, inputs, is_exact=True):
        assert not {"addmm_", "baddbmm_"}.intersection(names)
    for got, want in zip(loose, gradients(module), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-3)


def test_the_last_bits_may_differ() -> None:
    module = linear()
    inputs = [torch.randn(4000, 700) for _ in range(2)]
    run(module, inputs, is_exact=False)
    loose = gradients(module)
    run(module, inputs, is_exact=True)
    assert not torch.equal(loose[0], gradients(module)[0])


@pytest.mark.parametrize("post", [False, True])
def test_a_hook_sees_its_gradient(post: bool) -> None:
    module = linear()
    assert isinstance(module, nn.Linear)
    seen: list[Tensor] = []
    if post:
        module.weight.register_post_accumulate_grad_hook(
            lambda p: seen.append(p.detach())
        )
    else:
        module.weight.register_hook(seen.append)
    run(module, [torch.randn(60, 700) for _ in range(3)], is_exact=False)
    assert len(seen) == 3
