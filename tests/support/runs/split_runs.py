"""The laws of a split backward for one module, whatever it is: `check`.

plainly        one ``backward()`` for each micro-batch, in order
by_graphs      `split_forward`: B, then W
by_modules     `SplitModule`: as torch's stages call it
by_pipeline    a schedule with its passes in any order
check_change   something happens between B and W
"""

import gc
import random
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import small
import torch
from matmuls import CountMatmuls
from torch import Tensor, nn
from zoo import Case, outputs_in

import zbpp
from zbpp.core import Placement, Schedule, parse_job
from zbpp.runtime import SplitGraph, SplitModule, split_forward

IN_ORDER = "F0 F1 B0 F2 B1 W0 F3 B2 B3 W1 W2 W3"
OUT_OF_ORDER = "F0 F1 F2 B2 B0 W2 F3 B3 W0 BW1 W3"
Wrap = Callable[[Any], Any]
Found = dict[str, Any]
"""Gradients of parameters and inputs by name, and what hooks have seen."""


class Numbered(nn.Module):
    """A module with its inputs and its loss: takes the number of a micro-batch.

    All that is random is drawn by that number. The inputs depend on a parameter, as
    those of a later stage depend on what is before.

    Args:
        case: builds the module.
        dtype: of the module and its inputs; None: as it is built.
        wrap: calls the module in another way.
    """

    def __init__(
        self, case: Case, dtype: torch.dtype | None = None, wrap: Wrap | None = None
    ) -> None:
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.case, self.inner = case, case.build()
        if dtype is not None:
            self.inner.to(dtype)
        self.dtype = dtype or torch.float32
        self.called = self.inner if wrap is None else wrap(self.inner)
        self.before = nn.Parameter(torch.zeros((), dtype=self.dtype))

    def inputs(self, i: int) -> list[Tensor]:
        """Leaves; those with a gradient require it."""
        return [
            x.to(self.dtype).requires_grad_() if x.is_floating_point() else x
            for x in self.case.inputs(i)
        ]

    def forward(self, number: Tensor, *leaves: Tensor) -> Tensor:
        """The loss of a micro-batch, of these `inputs` or of some without gradients."""
        i = int(number)
        torch.default_generator.manual_seed(i)
        xs = [
            x + self.before if x.is_floating_point() else x
            for x in leaves or [x.detach() for x in self.inputs(i)]
        ]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.case.autocast):
            outputs = outputs_in(self.called(xs[0] if len(xs) == 1 else tuple(xs)))
        generator = torch.Generator().manual_seed(1000 + i)
        loss = torch.zeros((), dtype=self.dtype)
        for y in outputs:
            if y.requires_grad:
                dy = torch.randn(y.shape, generator=generator).to(y.dtype)
                loss = loss + (y * dy).sum()
        return loss

    def found(self) -> Found:
        """What passes have left in it."""
        seen = sorted(map(repr, getattr(self.inner, "seen", ())))
        return {"seen": seen} | {n: p.grad for n, p in self.named_parameters()}


def plainly(module: Numbered, n: int, *, scale: float = 1.0) -> Found:
    """By autograd alone."""
    found: Found = {}
    for i in range(n):
        xs = module.inputs(i)
        loss = module(torch.tensor(i), *xs)
        loss.backward(torch.full_like(loss, scale))
        found |= {f"input {j} of {i}": x.grad for j, x in enumerate(xs)}
    return found | module.found()


def by_graphs(module: Numbered, n: int) -> Found:
    """By B and W of one micro-batch after the other; the report must be true."""
    found: Found = {}
    for i in range(n):
        xs = module.inputs(i)
        for x in xs:
            x.grad = torch.full_like(x, 7) if x.requires_grad else None
        graph = split_forward(module, torch.tensor(i), *xs)
        where = graph.report(module.parameters())
        assert all(x == "W" or x.startswith("B: ") for x in where.values())
        waiting = {n for n, p in module.named_parameters() if where.get(p) == "W"}
        wanted = {f"inner.{name}" for name in module.case.waits.split()}
        assert i > 0 or wanted <= waiting, "what must wait is in B"
        assert graph.stored_bytes() == 0
        states = [_sums(module)]
        dxs = iter(graph.backward_input())
        found |= {
            f"input {j} of {i}": next(dxs) if x.requires_grad else None
            for j, x in enumerate(xs)
        }
        states.append(_sums(module))
        assert all(x.grad is None or bool((x.grad == 7).all()) for x in xs)
        n_bytes = graph.stored_bytes()
        graph.backward_weight()
        states.append(_sums(module))
        in_b, in_w = (
            {name for name in after if before.get(name) != after[name]}
            for before, after in pairwise(states)
        )
        assert in_w == waiting & (in_b | in_w), "the report is wrong"
        assert not in_b & in_w, "a gradient has a part from B and another from W"
        assert (n_bytes > 0) == bool(in_w) and graph.stored_bytes() == 0
    return found | module.found()


def _sums(module: nn.Module) -> dict[str, tuple[int, int]]:
    """What changes with each addition to a gradient."""
    grads = ((name, p.grad) for name, p in module.named_parameters())
    return {name: (id(g), g._version) for name, g in grads if g is not None}


def by_modules(module: Numbered, n: int) -> Found:
    """As torch's stages do: a backward runs B alone, and the builder gives its W."""
    split = module.called = SplitModule(module.called)
    found: Found = {}
    works = []
    for i in range(n):
        xs = module.inputs(i)
        module(torch.tensor(i), *xs).backward()
        works.append(split.dw_builder())
        found |= {f"input {j} of {i}": x.grad for j, x in enumerate(xs)}
    states = [_sums(module)]
    for work in works:
        work()
        states.append(_sums(module))
    changes = {before != after for before, after in pairwise(states)}
    assert len(changes) == 1, "one has the work of another"
    found |= module.found()
    del found["before"]  # rounds by the strides of the inputs' gradients
    return found


def by_pipeline(module: Numbered, order: str, **numerics: Any) -> Found:
    """By a pipeline of one stage that runs its passes in this order.

    Of two steps the second counts: by then the pipeline has seen such graphs.
    """
    schedule = schedule_of(order)
    n = schedule.n_microbatches
    with zbpp.Pipeline(
        [module],
        schedule,
        loss_fn=lambda loss, _: loss,
        optimizer=None,
        numerics=zbpp.Numerics(**numerics),
    ) as pipeline:
        for _ in range(2):
            module.zero_grad()
            getattr(module.inner, "seen", []).clear()
            pipeline.step(torch.arange(n), torch.zeros(n))
        return module.found()


def schedule_of(order: str) -> Schedule:
    """One stage with passes in this order."""
    jobs = [*(f"0{job}" for job in order.split()), "O"]
    orders = (tuple(parse_job(job, stage=0) for job in jobs),)
    return Schedule("by hand", Placement((0,)), order.count("F"), orders)


def pipeline_of(layers: Sequence[nn.Module], schedule: str = "ZBH1") -> zbpp.Pipeline:
    """Two stages, two micro-batches, and no optimizer."""
    return small.make(layers, schedule, optimizer=None, n_microbatches=2)


def random_order(seed: int, n: int) -> str:
    """Passes of one stage in an order that is valid, and may be very odd."""
    rng = random.Random(seed)
    order: list[str] = []
    for i in rng.sample(range(n), n):
        at = 0
        passes = [f"BW{i}"] if rng.random() < 0.3 else [f"B{i}", f"W{i}"]
        for job in (f"F{i}", *passes):
            at = rng.randint(at, len(order))
            order.insert(at, job)
            at += 1
    return " ".join(order)


def differences(found: Found, wanted: Found) -> list[str]:
    """Names of gradients that differ in a bit."""
    return [name for name in found if not _is_same(found[name], wanted[name])]


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other or (isinstance(one, list) and one == other)
    if one.is_sparse or other.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    return one.dtype == other.dtype and torch.equal(one, other)


def check(
    case: Case,
    *,
    dtype: torch.dtype | None = None,
    wrap: Wrap | None = None,
    plain_wrap: Wrap | None = None,
    orders: tuple[str, ...] = (IN_ORDER, OUT_OF_ORDER),
) -> None:
    """Every law for one module.

    Args:
        case: builds the module.
        dtype: see `Numbered`.
        wrap: calls the module in another way.
        plain_wrap: the same for whole backwards; None: the same way.
        orders: of passes.
    """

    def built() -> Numbered:
        return Numbered(case, dtype, wrap)

    def plain() -> Numbered:
        return Numbered(case, dtype, plain_wrap or wrap)

    wanted = plainly(plain(), 2)
    assert not differences(by_graphs(built(), 2), wanted)
    assert not differences(by_modules(built(), 2), wanted)
    for order in orders:
        n = order.count("F")
        if order == IN_ORDER or not hasattr(case.build(), "seen"):  # hooks see sums
            wanted = plainly(plain(), n, scale=1 / n)
            assert not differences(by_pipeline(built(), order), wanted), order
    if wrap is None:
        check_products(built(), built())


def check_products(module: Numbered, plain: Numbered) -> None:
    """B and W run the products of one backward, and W those of weights."""
    number = torch.tensor(0)
    graph = split_forward(module, number, *module.inputs(0))
    with CountMatmuls() as b:
        graph.backward_input()
    with CountMatmuls() as w:
        graph.backward_weight()
    loss = plain(number, *plain.inputs(0))
    with CountMatmuls() as whole:
        loss.backward()
    assert b.count + w.count == whole.count
    assert not module.case.waits or w.count > 0 or whole.count == 0


# What happens between passes.

Change = Callable[[Any, nn.Parameter], object]


def add_hook(module: Any, p: nn.Parameter) -> None:
    module.seen = seen = []
    p.register_hook(lambda g: (seen.append(tuple(g.shape)), g * 3)[1])


def add_hook_behind(module: Any, p: nn.Parameter) -> None:
    module.seen = seen = []
    p.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))


CHANGES: dict[str, Change] = {
    "a hook": add_hook,
    "a hook behind the sum": add_hook_behind,
    "frozen": lambda _, p: p.requires_grad_(False),
    "the sum is taken": lambda _, p: setattr(p, "grad", None),
}


def check_change(
    case: Case, change: Change, place: str, wrap: Wrap | None = None
) -> None:
    """The third of three micro-batches meets a change as a whole backward does.

    Args:
        case: a change concerns the first parameter that waits.
        change: takes module and parameter.
        place: ``"before B"``, or before W.
        wrap: calls the module in another way.
    """
    ours, plain = Numbered(case, wrap=wrap), Numbered(case, wrap=wrap)
    weight = case.waits.split()[0]
    for i in range(3):
        number = torch.tensor(i)
        loss = plain(number, *plain.inputs(i))
        graph = split_forward(ours, number, *ours.inputs(i))
        if i == 2 and place == "before B":
            change(ours.inner, ours.inner.get_parameter(weight))
        graph.backward_input()
        if i == 2:
            change(plain.inner, plain.inner.get_parameter(weight))
            if place == "before W":
                change(ours.inner, ours.inner.get_parameter(weight))
        loss.backward()
        graph.backward_weight()
    assert not differences(ours.found(), plain.found())


def check_operands(wrap: Wrap) -> None:
    """W keeps the operands of its products until it has run, and they may not change.

    Args:
        wrap: calls a layer in another way.
    """
    layer = nn.Linear(6, 8, bias=False)
    call = wrap(layer)
    x = torch.randn(4, 6)
    for is_changed in (False, True):
        graph = SplitGraph([y := call(x)])
        graph.backward_input(torch.ones_like(y))
        assert graph.stored_bytes() == 4 * (x.numel() + y.numel())
        if is_changed:
            x.add_(1)
            with pytest.raises(RuntimeError, match="changed in place after B"):
                graph.backward_weight()
        else:
            graph.backward_weight()
            assert graph.stored_bytes() == 0
            torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(8, 6))
    operand = weakref.ref(x)
    del x, y, graph
    gc.collect()
    assert operand() is None
