"""Corners of compiled regions: shapes, caches, threads, dtypes, inputs, hooks."""

import copy
import gc
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbpp.runtime import SplitGraph
from zbpp.runtime.backward.plan_cache import SplitPlanCache
from zbpp.runtime.compiled import backend, region
from zbpp.runtime.support import compile_internals

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"  # of torch by torch
)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)
        self.fired = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())

    def note(self, dw: Tensor) -> Tensor:
        self.fired += 1
        return 2 * dw


class Broken(Two):
    """Dynamo stops at the branch, and compiles what is before and after it."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        if y.sum() > 0:
            y = 2 * y
        return self.b(y)


def compiled(module: Callable[..., Any]) -> Any:
    return torch.compile(module, backend=backend.zbpp)


def split(call: Any, x: Tensor, **how: Any) -> tuple[int, tuple[Tensor | None, ...]]:
    """Run B and W; say how many leaves waited."""
    y = call(x)
    graph = SplitGraph([y], [x], **how)
    n = list(graph.report().values()).count("W")
    dy = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    found = graph.backward_input(dy)
    assert n == 0 or graph.held_bytes() > 0
    graph.backward_weight()
    return n, found


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def agree(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(gradients(left), gradients(right), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def fully(call: Any, x: Tensor) -> None:
    y = call(x)
    dy = torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)
    torch.autograd.backward(y, dy)


def test_another_shape_compiles_once_more_and_no_third(plain_kernels: None) -> None:
    module = Two()
    plain = copy.deepcopy(module)
    call, stock, plans = compiled(module), compiled(plain), SplitPlanCache()
    graphs = torch._dynamo.utils.counters["stats"]
    seen = []
    for n in (3, 5, 7, 9, 3):
        x = torch.randn(n, 6, requires_grad=True)
        assert split(call, x, plans=plans)[0] == 2
        seen.append(graphs["unique_graphs"])
        fully(stock, x.detach().requires_grad_())
    assert seen[0] < seen[1] == seen[-1]
    assert agree(module, plain)


@pytest.mark.slow
def test_threads_compile_side_by_side(plain_kernels: None) -> None:
    found: dict[int, int] = {}

    def run(i: int) -> None:
        x = torch.randn(3, 6, requires_grad=True)
        found[i] = split(compiled(Two()), x)[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == {0: 2, 1: 2}


@pytest.mark.slow
def test_sums_of_bf16_gradients_in_fp32(plain_kernels: None) -> None:
    module = Two().bfloat16()
    for p in module.parameters():
        p.grad_dtype = torch.float32
    plain = copy.deepcopy(module)
    for p in plain.parameters():
        p.grad_dtype = torch.float32
    call, stock = compiled(module), compiled(plain)
    for i in range(3):
        torch.manual_seed(i)
        x = torch.randn(4, 6, dtype=torch.bfloat16, requires_grad=True)
        assert split(call, x)[0] == 2
        fully(stock, x.detach().requires_grad_())
    assert {g.dtype for g in gradients(module)} == {torch.float32}
    assert agree(module, plain)


@pytest.mark.slow
def test_parts_around_a_graph_break_are_split(plain_kernels: None) -> None:
    module, plans = Broken(), SplitPlanCache()
    plain = copy.deepcopy(module)
    call, stock = compiled(module), compiled(plain)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for sign in (1, -1, 1):  # either way of the branch, and again
        x = (sign * torch.ones(4, 6)).requires_grad_()
        assert split(call, x, plans=plans)[0] == 2
        fully(stock, x.detach().requires_grad_())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before + 1
    assert agree(module, plain)


@pytest.mark.slow
def test_a_weight_that_is_used_beside_its_region_stays_in_b(
    plain_kernels: None,
) -> None:
    module = Two()
    plain = copy.deepcopy(module)
    call, stock = compiled(module), compiled(plain)
    for _ in range(2):
        x = torch.randn(4, 6, requires_grad=True)
        assert split(lambda x: call(x) @ module.b.weight, x)[0] == 1
        fully(lambda x: stock(x) @ plain.b.weight, x.detach().requires_grad_())
    assert agree(module, plain)


def test_a_product_that_two_weights_share_is_made_once(plain_kernels: None) -> None:
    first, second = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)
    call = compiled(lambda x: x @ (first.weight + second.weight).t())
    assert split(call, torch.randn(4, 6, requires_grad=True))[0] == 0
    assert agree(first, second)


def test_w_holds_the_narrow_numbers_that_its_products_widen(
    plain_kernels: None,
) -> None:
    layer = nn.Linear(6, 8, bias=False)
    x = torch.randn(4, 6, requires_grad=True)
    y = compiled(lambda x: layer(x).bfloat16())(x)
    graph = SplitGraph([y], [x])
    graph.backward_input(torch.ones_like(y))
    assert graph.held_bytes() == 4 * x.numel() + 2 * y.numel()
    graph.backward_weight()
    torch.testing.assert_close(layer.weight.grad, x.detach().sum(0).expand(8, 6))


def test_reports_say_what_another_backend_has_compiled() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    module = Two()
    y = torch.compile(module, backend="aot_eager")(x)
    graph = SplitGraph([y], [x])
    words = 'B: compiled without zbpp: use torch.compile(..., backend="zbpp")'
    assert set(graph.report().values()) == {words}
    graph.backward_input(torch.ones_like(y))
    graph.backward_weight()
    assert len(gradients(module)) == 4


def test_a_torch_without_a_name_runs_all_in_b(monkeypatch: pytest.MonkeyPatch) -> None:
    inner: list[Any] = []

    def unsplit(given: Any, graph: Any, inputs: Any, _: Any) -> Any:
        inner.append(given)
        return aot_eager(graph, inputs)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    monkeypatch.setitem(compile_internals._NAMES, "torch._C", ("_gone",))
    monkeypatch.setattr(backend, "compile_with", unsplit)
    y = compiled(Two())(torch.randn(4, 6, requires_grad=True))
    words = "B: compiled by a torch without torch._C._gone"
    assert set(SplitGraph([y]).report().values()) == {words}
    assert region.region_of(y.grad_fn) is None and inner == [None]


@pytest.mark.slow
def test_a_second_start_finds_its_kernels_and_is_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes; in the first one a plain compilation fills the caches too."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    first, second = (started("plain"), started())
    assert first["waits"] == second["waits"] == 2
    assert first["misses"] > 0
    assert (second["misses"], second["hits"]) == (0, 2)  # F and B


def started(*args: str) -> Any:
    program = Path(__file__).parents[2] / "support" / "runs" / "warm_start.py"
    command = [sys.executable, str(program), *args]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_cache_of_plain_compilations_is_left_alone(
    plain_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = Two(), torch.randn(4, 6, requires_grad=True)
    before = of_caches()
    assert split(compiled(module), x)[0] == 2
    assert of_caches() == before  # an entry there may be another's
    torch._dynamo.reset()
    monkeypatch.setitem(compile_internals._SETTINGS, "enable_autograd_cache", True)
    split(compiled(module), x)
    assert of_caches() > before


def of_caches() -> int:
    """The number of times that AOTAutograd has asked its cache, and saved there."""
    found = torch._dynamo.utils.counters["aot_autograd"]
    return sum(n for name, n in found.items() if "cache" in name)


# between B and W of a region


class Heard:
    """A progress that wants to hear of every piece."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def begin(self, edges: Sequence[Sequence[Any]]) -> None:
        self.told.append(-len(edges))

    def done(self, n: int) -> int:
        self.told.append(n)
        return n + 1


def nothing(net: Two) -> None:
    """Between B and W."""


def a_hook(net: Two) -> None:
    net.a.weight.register_hook(net.note)


def frozen(net: Two) -> None:
    net.b.weight.requires_grad_(False)


def no_sum(net: Two) -> None:
    net.b.weight.grad = None


def train(
    net: Two, between: Callable[[Two], None], xs: Sequence[Tensor], **how: Any
) -> Heard:
    """Two micro-batches; then something happens between B and W of a third."""
    call: Any = compiled(net)
    plans, heard = SplitPlanCache(), Heard()
    for turn, x in enumerate(xs):
        y = call(x)
        graph = SplitGraph([y], [x], plans=plans, **how)
        graph.backward_input(torch.ones_like(y))
        assert graph.defers() and graph.held_bytes() > 0
        if turn == len(xs) - 1:
            between(net)
        graph.backward_weight(heard if turn == 1 else None)
    return heard


def expected(net: Two, between: Callable[[Two], None], xs: Sequence[Tensor]) -> None:
    """The same by whole backwards; biases come from B, before it happens."""
    call: Any = compiled(net)
    for turn, x in enumerate(xs):
        y = call(x)
        if turn == len(xs) - 1:
            between(net)
        torch.autograd.backward(y, torch.ones_like(y))


def three_inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 6, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize(
    ("between", "is_exact"),
    [
        (nothing, True),
        (nothing, False),
        (a_hook, True),
        *(pytest.param(x, True, marks=pytest.mark.slow) for x in (frozen, no_sum)),
    ],
)
def test_w_adds_what_a_whole_backward_adds(
    plain_kernels: None, between: Callable[[Two], None], is_exact: bool
) -> None:
    net = Two()
    other = copy.deepcopy(net)
    heard = train(net, between, three_inputs(), is_exact=is_exact)
    expected(other, between, three_inputs())
    assert heard.told == [-2, 0, 1, 2]
    assert net.fired == other.fired == (between is a_hook)
    if is_exact:
        assert agree(net, other)
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_plan_keeps_nothing_of_its_first_graph(plain_kernels: None) -> None:
    net, plans = Two(), SplitPlanCache()
    x = torch.randn(4, 6, requires_grad=True)
    y = compiled(net)(x)
    graph = SplitGraph([y], [x], plans=plans)
    graph.backward_input(torch.ones_like(y))
    graph.backward_weight()
    held = weakref.ref(x)
    del x, y, graph
    gc.collect()
    assert held() is None


def test_a_region_below_which_no_gradient_is_wanted_leaves_its_work(
    plain_kernels: None,
) -> None:
    """The lower region has no bias and no input to give a gradient to."""
    parts = nn.Linear(6, 8, bias=False), nn.Linear(8, 6)
    lower, upper = map(compiled, parts)
    plans = SplitPlanCache()
    for x in three_inputs()[:2]:
        y = upper(lower(x.detach()))
        graph = SplitGraph([y], plans=plans)
        graph.backward_input(torch.ones_like(y))
        graph.backward_weight()
    sums = [p.grad for part in parts for p in part.parameters()]
    nn.Module.zero_grad(nn.Sequential(*parts))
    for x in three_inputs()[:2]:
        upper(lower(x.detach())).sum().backward()
    whole = [p.grad for part in parts for p in part.parameters()]
    assert all(map(torch.equal, sums, whole))


@pytest.mark.parametrize("n", [3, 2], ids=["as one", "piece by piece"])
def test_an_operand_that_was_changed_is_an_error(plain_kernels: None, n: int) -> None:
    net, xs = Two(), three_inputs()[:n]

    def change(_: Two) -> None:
        with torch.no_grad():
            xs[-1].add_(1)

    with pytest.raises(RuntimeError, match="changed in place after B"):
        train(net, change, xs)
