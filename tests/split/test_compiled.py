"""Compiled modules are split too: ``torch.compile(module, backend="zbpp")``.

All but a few slow tests leave Inductor's kernels out.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from split_runs import (
    CHANGES,
    IN_ORDER,
    Numbered,
    check,
    check_change,
    check_operands,
    differences,
    plainly,
)
from torch import Tensor, nn
from zoo import CASES, Case, Checkpointed, Fn, lin, normal, tied

import zbpp
from zbpp import diagnostics
from zbpp.runtime import SplitGraph, split_forward, testing

pytestmark = [
    pytest.mark.filterwarnings("ignore:.* gains little here"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # of torch
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method"),  # of torch
]
slow = partial(pytest.param, marks=pytest.mark.slow)
nightly = partial(pytest.param, marks=[pytest.mark.slow, pytest.mark.nightly])
compiled: Any = partial(torch.compile, backend="zbpp")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's compiler with no kernels of others; it forgets what it has compiled."""
    import torch._dynamo

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    yield
    torch._dynamo.reset()


@pytest.fixture
def plain_kernels() -> Iterator[list[Any]]:
    """Finished graphs run as they are, operator by operator, and are listed."""
    with testing.plain_kernels() as graphs:
        yield graphs


def breaking(m: Any, x: Tensor) -> Tensor:
    """The compiler stops at the branch, and compiles what is before and after it."""
    y = m.a(x).relu()
    if y.sum() > 8:
        y = 2 * y
    return m.b(y)


def in_two_parts(m: Any, x: Tensor) -> Tensor:
    """The first part has no bias, and no input that wants a gradient."""
    return m.b(m.a(x.detach()))


PARTS = {
    "two parts": Case(
        lambda: Fn(in_two_parts, a=compiled(lin(bias=False)), b=compiled(lin())),
        "a._orig_mod.weight b._orig_mod.weight",
    ),
    "used outside": Case(
        lambda: Fn(
            lambda m, x: in_two_parts(m, x) @ m.a.weight,
            a=compiled(lin(bias=False)),
            b=compiled(lin()),
        ),
        "b._orig_mod.weight",
    ),
    "in a checkpoint": Case(
        lambda: Checkpointed(nn.Sequential(lin(), compiled(lin()))), "inner.0.weight"
    ),
}
MORE = {
    "a broken graph": Case(lambda: Fn(breaking, a=lin(), b=lin()), "a.weight b.weight"),
    "rows of many sizes": Case(lin, "weight", lambda i: (normal(i, 3 + 2 * i, 6),)),
    "tied weights": Case(tied, ""),
}


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        *map(slow, ("a broken graph", "rows of many sizes")),
        *map(slow, ("tied weights", "experts selected", "autocast attention")),
        *map(nightly, ("bf16 with sums in fp32", "lora", "two outputs")),
        *map(nightly, ("conv2d, frozen weight", "a weight in three parts")),
        nightly("checkpoint in a checkpoint"),
    ],
)
def test_a_compiled_module_is_split_as_in_eager_mode(
    name: str, plain_kernels: list[Any]
) -> None:
    """What must wait waits; the bits are those of the whole compiled backward."""
    check((CASES | MORE)[name], wrap=compiled)


def test_a_product_of_two_weights_is_computed_once(
    plain_kernels: list[Any],
) -> None:
    """So it is made in B: W would make it for each of them."""
    case = Case(lambda: Fn(lambda m, x: x @ (m.v + m.w).t(), v=(5, 6), w=(5, 6)), "")
    ours, plain = Numbered(case, wrap=compiled), Numbered(case, wrap=compiled)
    wanted = plainly(plain, 1)
    graph = split_forward(ours, torch.tensor(0), *ours.inputs(0))
    graph.backward_input()
    assert graph.stored_bytes() == 0
    assert not differences(ours.found(), wanted)


@pytest.mark.parametrize(
    "name", [slow("two parts"), nightly("used outside"), nightly("in a checkpoint")]
)
def test_modules_with_compiled_parts_are_split(
    name: str, plain_kernels: list[Any]
) -> None:
    check(PARTS[name], wrap=lambda module: module, orders=(IN_ORDER,))


@pytest.mark.slow
def test_real_kernels_have_the_bits_of_a_stock_compilation(compiler: None) -> None:
    check(CASES["mlp"], wrap=compiled, plain_wrap=torch.compile, orders=())


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ("a hook", "before W"),
        *(nightly(x, "before W") for x in CHANGES if x != "a hook"),
        nightly("a hook", "before B"),
    ],
)
def test_changes_between_compiled_passes_act_as_in_a_full_backward(
    change: str, place: str, plain_kernels: list[Any]
) -> None:
    check_change(CASES["mlp"], CHANGES[change], place, wrap=compiled)


def test_operands_stay_until_w_and_may_not_change(plain_kernels: list[Any]) -> None:
    check_operands(compiled)


def test_another_shape_compiles_once_more_and_a_third_does_not(
    plain_kernels: list[Any],
) -> None:
    call = compiled(CASES["mlp"].build())
    n_graphs = []
    for n in (3, 5, 7, 3):
        graph = SplitGraph([y := call(torch.randn(n, 6))])
        assert list(graph.report().values()).count("W") == 2
        graph.backward_input(torch.ones_like(y))
        graph.backward_weight()
        n_graphs.append(len(plain_kernels))
    assert n_graphs[0] < n_graphs[1] == n_graphs[-1]


@pytest.mark.slow
def test_threads_compile_at_the_same_time(plain_kernels: list[Any]) -> None:
    def n_waiting(x: Tensor) -> int:
        graph = split_forward(compiled(CASES["mlp"].build()), x.requires_grad_())
        return list(graph.report().values()).count("W")

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(n_waiting, torch.randn(2, 3, 6))] == [2, 2]


@pytest.mark.parametrize("backend", ["aot_eager", slow("zbpp")])
def test_unsupported_compiled_graphs_stay_in_b(
    backend: str, compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another backend's, and ours under a torch that does not know the node it runs."""
    if backend == "zbpp":
        monkeypatch.delattr(torch._C, "_current_autograd_node")
    module = Numbered(Case(lin, ""), wrap=partial(torch.compile, backend=backend))
    with testing.plain_kernels():
        graph = split_forward(module, torch.tensor(0))
    where = graph.report()
    assert all(where[p].startswith("B: ") for p in module.inner.parameters())
    graph.backward_input()
    graph.backward_weight()
    assert all(p.grad is not None for p in module.inner.parameters())


PROGRAM = """
import json, sys, torch
from torch import nn
from zbpp.runtime import SplitGraph
module = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False))
x = torch.randn(4, 6, requires_grad=True)
if "plain" in sys.argv:
    torch.compile(module)(x).sum().backward()
    torch._dynamo.reset()
graph = SplitGraph([torch.compile(module, backend="zbpp")(x)], [x])
waits = list(graph.report().values()).count("W")
graph.backward_input(torch.ones(4, 6))
graph.backward_weight()
found = torch._dynamo.utils.counters["inductor"]
print(json.dumps([waits, found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]]))
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_second_process_splits_from_cached_kernels(compiler: None) -> None:
    """In the first process a plain compilation fills the caches too."""
    found = []
    for words in (["plain"], []):
        command = [sys.executable, "-c", PROGRAM, *words]
        done: Any = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    (waits, _, misses), second = found
    assert waits == 2 and misses > 0
    assert second == [2, 2, 0], "F and B were found"


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.filterwarnings("ignore")  # of torch and transformers
def test_compiled_transformer_blocks_defer_the_same_weights(
    plain_kernels: list[Any],
) -> None:
    from tiny_hf import batch_of, tiny

    def stepped(**how: Any) -> tuple[set[str], dict[str, Tensor]]:
        with zbpp.Pipeline(
            tiny("gpt2", 2),
            "ZBH1",
            optimizer=None,
            n_stages=2,
            n_microbatches=2,
            execution=zbpp.Execution(**how),
        ) as pipeline:
            pipeline.step(batch_of("gpt2", 4))
            report = diagnostics.split_report(pipeline)
            grads = {n: p.grad.clone() for n, p in pipeline.named_parameters()}
            return {name for name, text in report.items() if text == "W"}, grads

    waits, wanted = stepped()
    compiled_waits, found = stepped(compile="blocks")
    assert compiled_waits == waits and len(waits) > 4 and plain_kernels
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
