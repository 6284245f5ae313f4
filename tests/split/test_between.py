"""What happens between the passes: hooks, frozen weights, sums that are taken away."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from split_runs import CHANGES, check_change, pipeline_of
from torch import nn
from zoo import CASES

from zbpp.core import RequestError
from zbpp.runtime import SplitModule, split_forward


@pytest.mark.parametrize("place", ["before B", "before W"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["mlp", "conv2d", "experts selected"])
def test_changes_between_passes_act_as_in_a_full_backward(
    name: str, change: str, place: str
) -> None:
    check_change(CASES[name], CHANGES[change], place)


# What is refused, in one line.


def after_b() -> Callable[[], object]:
    graph = split_forward(nn.Linear(4, 4), torch.ones(2, 4))
    graph.backward_input(torch.ones(2, 4))
    return partial(graph.backward_input, torch.ones(2, 4))


def by_a_retained_graph() -> Callable[[], object]:
    y = SplitModule(nn.Linear(4, 4))(torch.ones(2, 4))
    y.sum().backward(retain_graph=True)
    return y.sum().backward


def before_b() -> Callable[[], object]:
    return split_forward(nn.Linear(4, 4), torch.ones(2, 4)).backward_weight


def with_a_module_hook() -> Callable[[], object]:
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].register_backward_hook(lambda *_: None)
    return partial(split_forward, module, torch.ones(2, 4))


REFUSED: dict[str, tuple[Callable[[], Callable[[], object]], str]] = {
    "W before B": (before_b, "W runs after B"),
    "B twice": (after_b, "B runs once"),
    "a retained graph": (by_a_retained_graph, "B runs once"),
    "deprecated hooks": (with_a_module_hook, r"use register_full_backward_hook\(\)"),
}


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_refused_in_one_line(name: str) -> None:
    prepare, words = REFUSED[name]
    with pytest.raises((RuntimeError, RequestError), match=words) as refused:
        prepare()()
    assert "\n" not in str(refused.value)


WRONG = {
    "none": ([], "0 gradients, and 2"),
    "three": ([torch.ones(2, 4)] * 3, "3 gradients, and 2"),
    "a missing list": (None, "only for scalar outputs"),
    "another shape": ([torch.ones(4, 2), None], r"got \[4, 2\] but expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradients_leave_the_graph_usable(name: str) -> None:
    wrong, words = WRONG[name]
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    graph = split_forward(lambda x: (y := layer(x), y * 2), x)
    with pytest.raises((RuntimeError, RequestError), match=words):
        graph.backward_input(wrong)
    assert layer.bias.grad is None
    (dx,) = graph.backward_input([torch.ones(2, 4), None])
    assert dx is not None and torch.equal(dx, torch.ones(2, 4) @ layer.weight)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_a_pipeline_refuses_deprecated_hooks_when_it_is_made_and_in_steps() -> None:
    layers, x = [nn.Linear(4, 4), nn.Linear(4, 4)], torch.ones(2, 4)
    handle = layers[0].register_backward_hook(lambda *_: None)
    with pytest.raises(RequestError, match="register_full_backward_hook"):
        pipeline_of(layers)
    handle.remove()
    with pipeline_of(layers) as pipeline:
        pipeline.step(x, x)
        (_, layer), *_ = pipeline.named_layers()
        handle = layer.register_backward_hook(lambda *_: None)
        with pytest.raises(RequestError, match="register_full_backward_hook"):
            pipeline.step(x, x)
        handle.remove()
        pipeline.step(x, x)


def test_leaves_do_not_share_the_gradient_that_a_caller_gives() -> None:
    module, dy = CASES["sums that are one tensor"].build(), torch.ones(3, 4, 6)
    for n in (1, 2):
        graph = split_forward(module, torch.ones(3, 4, 6))
        graph.backward_input(dy)
        graph.backward_weight()
        for name in ("a", "b"):
            assert torch.equal(module.get_parameter(name).grad, n * torch.ones(3, 4, 6))
    assert torch.equal(dy, torch.ones(3, 4, 6))
