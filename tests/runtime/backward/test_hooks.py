"""Hooks of every kind see and change what they would in one backward."""

import copy
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from zbpp.runtime import SplitGraph, WeightQueue, split_forward
from zbpp.runtime.backward.hooks import watch

Seen = list[Any]
Hook = Callable[[nn.Module, Seen], Callable[[Tensor], Tensor]]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def x() -> Tensor:
    return torch.randn(3, 6, dtype=torch.float64)


def note(seen: Seen, *gradients: Tensor | None) -> None:
    """Keep which were given, and their sum."""
    seen.append([None if g is None else float(g.sum()) for g in gradients])


def module_backward_hook(module: Any, seen: Seen) -> Callable[[Tensor], Tensor]:
    module[0].register_backward_hook(lambda m, dx, dy: note(seen, *dx))
    return module


def scaling_backward_hook(module: Any, seen: Seen) -> Callable[[Tensor], Tensor]:
    def scale(m: Any, dx: Any, dy: Any) -> Any:
        return tuple(None if d is None else d * 3 for d in dx)

    module[2].register_backward_hook(scale)
    return module


def post_hook_on_a_product(module: Any, seen: Seen) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y = module(x)
        y.grad_fn.register_hook(lambda dx, dy: note(seen, *dx))
        return y

    return run


def prehook_on_a_product(module: Any, seen: Seen) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        y = module(x)
        y.grad_fn.register_prehook(lambda dy: tuple(d * 2 for d in dy))
        return y

    return run


def full_backward_hook(module: Any, seen: Seen) -> Callable[[Tensor], Tensor]:
    module[0].register_full_backward_hook(lambda m, dx, dy: note(seen, *dy))
    return module


def all_of_several(module: Any, seen: Seen) -> Callable[[Tensor], Tensor]:
    register_multi_grad_hook(list(module.parameters()), lambda g: note(seen, *g))
    return module


def any_of_several(module: Any, seen: Seen) -> Callable[[Tensor], Tensor]:
    parameters = list(module.parameters())
    register_multi_grad_hook(parameters, lambda g: seen.append("any"), mode="any")
    return module


def on_a_transpose(module: Any, seen: Seen) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        w = module[0].weight.t()
        w.register_hook(lambda g: (note(seen, g), g * 3)[1])
        return module[1:](x @ w + module[0].bias)

    return run


def on_the_node_of_a_transpose(module: Any, seen: Seen) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        w = module[0].weight.t()
        w.grad_fn.register_hook(lambda out, given: note(seen, *given))
        return module[1:](x @ w + module[0].bias)

    return run


def on_the_node_of_a_leaf(module: Any, seen: Seen) -> Callable[[Tensor], Tensor]:
    weight = module[0].weight
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda given: note(seen, *given))
    node.register_hook(lambda out, given: note(seen, *given))
    module.kept = [node]
    return module


HOOKS: list[Hook] = [
    module_backward_hook,
    scaling_backward_hook,
    post_hook_on_a_product,
    prehook_on_a_product,
    full_backward_hook,
    all_of_several,
    any_of_several,
    on_a_transpose,
    on_the_node_of_a_transpose,
    on_the_node_of_a_leaf,
]


@pytest.mark.filterwarnings("ignore")  # non-full backward hooks are deprecated
@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_sees_and_changes_the_same(hook: Hook, is_exact: bool) -> None:
    plain, split = build(), build()
    seen: list[Seen] = [[], []]
    runs = [hook(module, s) for module, s in zip((plain, split), seen, strict=True)]
    for _ in range(3):  # in place, the first gradient is not added but kept
        batch = x()
        runs[0](batch).sum().backward()
        y = runs[1](batch)
        graph = SplitGraph([y], is_exact=is_exact)
        graph.backward_input(torch.ones_like(y))
        graph.backward_weight()
    assert len(seen[0]) == len(seen[1])
    for one, other in zip(*seen, strict=True):
        assert one == pytest.approx(other)
    for p, q in zip(plain.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    if is_exact:
        for p, q in zip(plain.parameters(), split.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


@pytest.mark.filterwarnings("ignore")
def test_the_report_says_why_a_hook_keeps_a_weight_in_b() -> None:
    module = build()
    y = module_backward_hook(module, [])(x())
    where = SplitGraph([y]).report()
    assert where[module[0].weight] == "B: a hook on its product"
    assert where[module[2].weight] == "W"
    module = build()
    y = all_of_several(module, [])(x())
    where = SplitGraph([y]).report()
    assert where[module[2].weight] == "B: a hook on several gradients at once"


def test_a_hook_that_comes_after_the_report_is_seen() -> None:
    plain, split = build(), build()
    batch, seen, found = x(), [], []
    y = plain(batch)
    y.grad_fn.register_hook(lambda dx, dy: note(seen, *dx))
    y.sum().backward()
    graph = split_forward(split, batch)
    assert graph.report()[split[2].weight] == "W"
    graph = SplitGraph([y := split(batch)])
    assert graph.report()[split[2].weight] == "W"
    y.grad_fn.register_hook(lambda dx, dy: note(found, *dx))
    graph.backward_input(torch.ones_like(y))
    assert seen == found and len(seen) == 1


def test_hooks_elsewhere_keep_nothing_from_w() -> None:
    module = build()
    module[1].register_forward_hook(lambda *_: None)
    module[0].weight.register_hook(lambda g: None)
    graph = SplitGraph([module(x())])
    module.register_forward_hook(lambda *_: None)
    where = graph.report()
    assert [where[module[i].weight] for i in (0, 2)] == ["W", "W"]


def test_a_copy_has_its_own_hooks() -> None:
    module = build()
    copied = copy.deepcopy(module)
    y = module(x())
    y.grad_fn.register_hook(lambda dx, dy: None)
    assert SplitGraph([copied(x())]).report()[copied[2].weight] == "W"


def test_nodes_are_free_of_older_hooks_whatever_thread_made_others() -> None:
    thread = Thread(target=lambda: split_forward(build(), x()))
    thread.start()
    thread.join()
    elsewhere = torch.ones(1, requires_grad=True)
    elsewhere.register_hook(lambda g: None)
    queue = WeightQueue()
    y = build()(x())
    watch.turn_to(queue.birth)
    assert watch.is_free(y.grad_fn)
    elsewhere.register_hook(lambda g: None)  # it might be on that node
    watch.turn_to(queue.birth)
    assert not watch.is_free(y.grad_fn)
