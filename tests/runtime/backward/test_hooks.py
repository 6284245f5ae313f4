"""Hooks of parameters, outputs and modules see and change what they would unsplit."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from small_model import batch, build, make_pipeline, refusal
from torch import Tensor, nn

from zbpp.runtime import SplitGraph, WeightQueue, split_forward
from zbpp.runtime.backward.plan_cache import SplitPlanCache

Seen = list[Any]
Run = Callable[[Tensor], Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def note(seen: Seen, *gradients: Tensor | None) -> None:
    """Keep which were given, and their sum."""
    seen.append([None if g is None else float(g.sum()) for g in gradients])


def of_a_module(module: Any, seen: Seen) -> Run:
    module[0].register_full_backward_hook(lambda m, dx, dy: note(seen, *dy))
    module[2].register_full_backward_pre_hook(lambda m, dy: tuple(d * 2 for d in dy))
    return module  # type: ignore[no-any-return]


def of_parameters(module: Any, seen: Seen) -> Run:
    module[0].weight.register_hook(lambda g: (note(seen, g), g * 3)[1])
    module[0].bias.register_hook(lambda g: (note(seen, g), g * 3)[1])
    for p in module[2].parameters():
        p.register_post_accumulate_grad_hook(lambda p: note(seen, p.grad))
    return module  # type: ignore[no-any-return]


def of_outputs(module: Any, seen: Seen) -> Run:
    def run(x: Tensor) -> Tensor:
        hidden = module[0](x)
        hidden.register_hook(lambda g: (note(seen, g), g * 2)[1])
        y: Tensor = module[2](module[1](hidden))
        y.register_hook(lambda g: g * 5)
        return y

    return run


@pytest.mark.parametrize("has_plans", [False, True])
@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("hook", [of_a_module, of_parameters, of_outputs])
def test_a_hook_sees_and_changes_the_same(
    hook: Callable[[Any, Seen], Run], is_exact: bool, has_plans: bool
) -> None:
    plain, split = net(), net()
    plans = SplitPlanCache() if has_plans else None
    seen: list[Seen] = [[], []]
    runs = [hook(module, s) for module, s in zip((plain, split), seen, strict=True)]
    for _ in range(3):
        x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
        runs[0](x).sum().backward()
        with WeightQueue() as queue:
            y = runs[1](x)
        graph = SplitGraph([y], [x], queue, is_exact=is_exact, plans=plans)
        graph.backward_input(torch.ones_like(y))
        graph.backward_weight()
    assert len(seen[0]) == len(seen[1]) > 0
    for one, other in zip(*(sorted(map(repr, s)) for s in seen), strict=True):
        assert one == other or not is_exact
    for p, q in zip(plain.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
        assert torch.equal(q.grad, p.grad) or not is_exact


@pytest.mark.parametrize("has_weight_last", [False, True])
def test_a_hook_that_comes_after_b_is_seen(has_weight_last: bool) -> None:
    module, seen = net(), Seen()
    for is_hooked in (False, True):
        graph = split_forward(module, torch.ones(3, 6, dtype=torch.float64))
        graph.backward_input(torch.ones(3, 4, dtype=torch.float64))
        if is_hooked:
            module[2 if has_weight_last else 0].weight.register_hook(seen.append)
        graph.backward_weight()
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_deprecated_hooks_are_refused() -> None:
    def add(module: Any) -> Any:
        return module.register_backward_hook(lambda *_: None)

    def hooked(layers: range) -> list[nn.Module]:
        built = build(layers)
        add(built[0])
        return built

    words = "register_full_backward_hook()"
    module = net()
    handle = add(module[2])
    assert words in refusal(split_forward, module, torch.ones(3, 6).double())
    handle.remove()
    split_forward(module, torch.ones(3, 6).double())
    assert words in refusal(partial(make_pipeline, model=hooked), "ZBH1", 2)
    pipeline = make_pipeline("ZBH1", 2)
    pipeline.step(*batch(0))
    *_, (_, layer) = pipeline.named_layers()
    handle = add(layer)
    assert words in refusal(pipeline.step, *batch(1))
    handle.remove()
    (_, other), *_ = list(pipeline.named_layers())[1:]
    other.register_full_backward_hook(lambda *_: None)
    pipeline.step(*batch(1))
