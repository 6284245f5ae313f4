"""B then W is loss.backward(), to the bit; B leaves the weight matmuls to W."""

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from zbpp.runtime.split_backward import DeferredLinear, WeightQueue, defer_linears


class CountMatmuls(TorchDispatchMode):
    """Counts the matrix products that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.overloadpacket in (
            torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm,
        )  # fmt: skip
        return func(*args, **(kwargs or {}))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 5))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = mlp(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def frozen() -> nn.Module:
    module = mlp()
    module[0].weight.requires_grad_(False)
    return module


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu(self.linear(x)))


CASES: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "no bias": lambda: nn.Linear(6, 5, bias=False),
    "tied weights": Tied,
    "one linear used twice": Twice,
    "frozen weight": frozen,
    "checkpoint": lambda: Checkpointed(reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(reentrant=True),
    "convolution": lambda: nn.Sequential(nn.Unflatten(-1, (2, 3)), nn.Flatten(0, 1),
                                         nn.Conv1d(2, 4, 2)),
}  # fmt: skip


def backward(module: nn.Module, x: Tensor, dy: Tensor, *, split: bool) -> Tensor:
    """One backward; return the input's gradient."""
    x = x.clone().requires_grad_()
    if not split:
        module(x).backward(dy)
    else:
        queue = WeightQueue()
        with queue.recording():
            y = module(x)
        with queue.recording():
            y.backward(dy)
        queue.run()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_b_then_w_equals_one_backward(case: str, dtype: torch.dtype) -> None:
    module = CASES[case]()
    autocast = dtype is torch.bfloat16
    if not autocast:
        module = module.to(dtype)
    plain = copy.deepcopy(module)
    defer_linears([module])
    for _ in range(3):
        x = torch.randn(4, 3, 6, dtype=torch.float32 if autocast else dtype)
        computed = torch.bfloat16 if autocast else dtype
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            dy = torch.randn(plain(x.clone().requires_grad_()).shape, dtype=computed)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            left = backward(module, x, dy, split=True)
            right = backward(plain, x, dy, split=False)
        assert torch.equal(left, right)
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if autocast and case == "one linear used twice":
            # torch sums the two gradients of its cached bf16 copy in bf16, we in fp32
            torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=2e-2)
        else:
            assert p.grad is None or torch.equal(p.grad, q.grad), name


def test_b_runs_no_weight_matmul_and_w_runs_no_other() -> None:
    module = mlp()
    defer_linears([module])
    x, queue = torch.randn(4, 6, requires_grad=True), WeightQueue()
    with queue.recording():
        y = module(x)
    with CountMatmuls() as b, queue.recording():
        y.sum().backward()
    assert (b.count, len(queue)) == (2, 2)
    assert module[0].weight.grad is None and module[0].bias.grad is not None
    with CountMatmuls() as w:
        queue.run()
    assert w.count == 2 and module[0].weight.grad is not None
    plain = copy.deepcopy(module)
    for linear in (plain[0], plain[3]):
        linear.__class__ = nn.Linear
    with CountMatmuls() as full:
        plain(x).sum().backward()
    assert full.count == 2 + b.count + w.count  # two in the forward


def test_a_checkpointed_block_is_recomputed_once() -> None:
    calls = Counter[str]()
    module = Checkpointed(reentrant=False)
    module.inner.register_forward_pre_hook(lambda *_: calls.update(["forward"]))
    defer_linears([module])
    backward(module, torch.randn(2, 6), torch.randn(2, 5), split=True)
    assert calls["forward"] == 2  # F, and one recompute in B; none in W


def test_only_plain_linears_of_their_own_weight_are_deferred() -> None:
    class Odd(nn.Linear):
        pass

    modules = nn.ModuleList([nn.Linear(2, 2), Odd(2, 2), Tied(), nn.Conv1d(1, 1, 1)])
    assert defer_linears(modules) == 1
    assert type(modules[0]) is DeferredLinear and type(modules[1]) is Odd
    assert defer_linears(modules) == 1  # again: no change


def test_a_deferred_linear_is_a_plain_one_elsewhere() -> None:
    module = mlp()
    state = copy.deepcopy(module.state_dict())
    defer_linears([module])
    module.load_state_dict(state)
    x = torch.randn(4, 6)
    module(x).sum().backward()
    assert module[0].weight.grad is not None
    with torch.no_grad(), WeightQueue().recording():
        assert not module(x).requires_grad


def test_w_frees_what_it_used_and_nothing_leaks() -> None:
    module = mlp()
    defer_linears([module])
    kept: list[weakref.ref[Tensor]] = []
    x, queue = torch.randn(4, 6, requires_grad=True), WeightQueue()
    with queue.recording():
        hidden = module[:3](x)
        y = module[3](hidden)
    kept.append(weakref.ref(hidden))
    with queue.recording():
        y.sum().backward()
    del hidden, y
    gc.collect()
    assert kept[0]() is not None  # W needs the input of the last Linear
    queue.run()
    gc.collect()
    assert kept[0]() is None and len(queue) == 0
