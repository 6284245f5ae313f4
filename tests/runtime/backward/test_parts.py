"""Weights of experts wait for W: grouped products, and leaves used in parts."""

import copy
from collections.abc import Callable

import pytest
import torch
from moe_cases import PARTS, selected
from torch import Tensor, nn
from torch.nn.functional import grouped_mm
from zoo import Fn

from zbpp.runtime import SplitGraph
from zbpp.runtime.backward.plan_cache import SplitPlanCache

ENDS = torch.tensor([3, 3, 7, 16], dtype=torch.int32)
GROUPED: dict[str, Callable[[], nn.Module]] = {
    "right": lambda: Fn(lambda m, x: grouped_mm(x, m.w, offs=ENDS), w=(4, 8, 16)),
    "right, transposed": lambda: Fn(
        lambda m, x: grouped_mm(x, m.w.transpose(-2, -1), offs=ENDS), w=(4, 16, 8)
    ),
    "left": lambda: Fn(lambda m, x: grouped_mm(m.w, x.t(), offs=ENDS), w=(4, 16, 8)),
    "left, transposed": lambda: Fn(
        lambda m, x: grouped_mm(m.w.mT, x.t(), offs=ENDS), w=(4, 8, 16)
    ),
    "batches": lambda: Fn(
        lambda m, x: grouped_mm(x.view(4, 4, 8), m.w), w=(4, 8, 16)
    ),
}  # fmt: skip


def both(
    module: nn.Module, inputs: list[Tensor], *, is_exact: bool = True
) -> tuple[list[Tensor], list[Tensor], dict[str, str]]:
    """Gradients of backwards, and of B and W in another order; what waits for W."""
    other = copy.deepcopy(module)
    for x in inputs:
        y = other(x)
        y.backward(torch.ones_like(y))
    graphs = [SplitGraph([module(x)], [x], is_exact=is_exact) for x in inputs]
    report = graphs[0].report()
    where = {name: report.get(p, "") for name, p in module.named_parameters()}
    for graph, x in zip(graphs, inputs, strict=True):
        graph.backward_input(torch.ones_like(other(x)))
    for graph in graphs:
        graph.backward_weight()
    return gradients(module), gradients(other), where


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_of_a_grouped_product_waits(name: str, dtype: torch.dtype) -> None:
    module = GROUPED[name]().to(dtype)
    inputs = [torch.randn(16, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    for is_exact in (True, False):
        got, want, where = both(copy.deepcopy(module), inputs, is_exact=is_exact)
        assert where == {"w": "W"}
        assert all(map(torch.equal, got, want))
        assert [x.stride() for x in got] == [x.stride() for x in want]


@pytest.mark.parametrize("kind", ["eager", "batched_mm", "grouped_mm"])
def test_the_experts_of_mixtral_wait(kind: str) -> None:
    pytest.importorskip("transformers")
    from tiny_hf import batch_of, tiny

    model = tiny("mixtral", 2)
    model.set_experts_implementation(kind)
    other = copy.deepcopy(model)
    graphs = []
    for i in range(3):
        batch = batch_of("mixtral", 2, seed=i)
        other(**batch).loss.backward()
        graphs.append(SplitGraph([model(**batch).loss]))
    where = graphs[0].report()
    waits = {name for name, p in model.named_parameters() if where.get(p) == "W"}
    experts = {name for name, _ in model.named_parameters() if ".experts." in name}
    assert len(experts) == 4 and experts < waits
    for graph in graphs:
        graph.backward_input()
    for graph in graphs:
        graph.backward_weight()
    assert all(map(torch.equal, gradients(model), gradients(other)))


REASONS = {
    "parts that overlap": "B: its parts overlap",
    "a part used thrice": "B: its parts overlap",
    "one chunk used twice": "B: its parts overlap",
    "a part and the whole": "B: used 2 times",
    "a part and its norm": "B: used in parts, and in other ways",
    "experts selected, hooks": "B: used in parts, and a hook is to see them as one",
}


@pytest.mark.parametrize("name", REASONS)
def test_the_report_says_why_parts_do_not_wait(name: str) -> None:
    module = PARTS[name].build()
    graph = SplitGraph([module(x) for x in PARTS[name].inputs(0)])
    name_of = {p: name for name, p in module.named_parameters()}
    where = {name_of[p]: text for p, text in graph.report().items()}
    assert where.get("w", where.get("up")) == REASONS[name]


def test_slices_are_added_without_autograd_and_may_be_others_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Fn(lambda m, x: x @ m.w[m.i] + x @ m.w[m.j], w=(3, 6, 6))
    other, plans = copy.deepcopy(module), SplitPlanCache()
    for turn, (i, j) in enumerate([(0, 1), (2, 0), (1, 1), (1, 2)]):
        module.i = other.i = i  # type: ignore[assignment]
        module.j = other.j = j  # type: ignore[assignment]
        x = torch.randn(4, 6)
        other(x).sum().backward()
        graph = SplitGraph([module(x)], plans=plans)
        assert set(graph.report().values()) == (
            {"W"} if i != j else {"B: its parts overlap"}
        )
        graph.backward_input(torch.ones(4, 6))
        with monkeypatch.context() as patched:
            patched.delattr(torch.autograd, "backward")
            graph.backward_weight()
        assert all(map(torch.equal, gradients(module), gradients(other))), turn


def test_a_hook_that_comes_between_b_and_w_sees_slices_as_one() -> None:
    module = Fn(selected, router=(6, 4), up=(4, 8, 6), down=(4, 6, 8))
    seen: list[Tensor] = []
    graph = SplitGraph([module(torch.randn(3, 4, 6))])
    graph.backward_input(torch.ones(3, 4, 6))
    module.get_parameter("up").register_hook(seen.append)
    graph.backward_weight()
    assert [x.shape for x in seen] == [(4, 8, 6)]
