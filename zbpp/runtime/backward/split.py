"""B and W as two calls, for any module; this file knows nothing of pipelines.

The backward of a matrix product is two matrix products. Autograd runs both; here B
runs the first, keeps the operands of the second in a queue, and W runs the queue:

    F   y  = x w^T + b
    B   dx = dy w,  db = sum(dy)      keeps (x, dy)
    W   dw = dy^T x                   drops them

F runs as ever. B is autograd's own backward, asked for everything but the weights that
wait (`plan`). W computes the other half of their products (`products`), and hands each
to autograd where the weight enters its product, so that casts, slices and hooks on the
way, and the sum, are autograd's. Where autograd would only add, W adds by itself. A
split backward and ``loss.backward()`` agree to the last bit.

>>> import torch
>>> from zbpp.runtime.backward.split import split_forward
>>> layer = torch.nn.Linear(2, 2)
>>> x = torch.ones(1, 2, requires_grad=True)
>>> graph = split_forward(layer, x)
>>> (dx,) = graph.backward_input(torch.ones(1, 2))
>>> layer.weight.grad, layer.bias.grad
(None, tensor([1., 1.]))
>>> graph.backward_weight()
>>> layer.weight.grad
tensor([[1., 1.],
        [1., 1.]])
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar, Token
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbpp.core import RequestError
from zbpp.runtime.backward.plan import (
    Plan,
    PlanCache,
    Product,
    Site,
    grad_dtype_of,
    is_plain,
    make_plan,
)
from zbpp.runtime.backward.products import Rule
from zbpp.runtime.backward.wrappers import check_module
from zbpp.runtime.compiled.backend import defer_piece
from zbpp.runtime.support.autograd_internals import (
    add_hook,
    hooks_made,
    is_built_in,
    run_backward,
)
from zbpp.runtime.support.pytree import map_tensors, refuse_hidden
from zbpp.runtime.support.sharded import own_shard

__all__ = [
    "IN_B",
    "Progress",
    "SplitGraph",
    "WeightQueue",
    "alias_of",
    "current_queue",
    "memory_of",
    "split_forward",
]

IN_B = "B: no product's weight"
"""In a report: a leaf that some node uses otherwise than as the weight of a product."""

_TOGETHER_BYTES = 4 * 2**20
"""Gradients that one call of autograd accumulates: a call costs up to 0.1 ms with cold
caches, and until then the gradients are held."""


# ---- What B leaves for W.


class Progress(Protocol):
    """Hears how far W is."""

    def begin(self, leaves: Sequence[Tensor]) -> None:
        """W begins, and will add to these leaves."""

    def done(self, leaf: Tensor) -> None:
        """All gradients of a leaf are added."""


class _Work(NamedTuple):
    """The second half of one product.

    Args:
        product: whose.
        edges: where the gradients of its weights go.
        tensors: the gradient of the product, and the operands.
        settings: see `Rule`.
        versions: how often each tensor had been changed in place when it was kept.
    """

    product: Product
    edges: Sequence[Any]
    tensors: Sequence[Any]
    settings: Sequence[Any]
    versions: Sequence[int]


def memory_of(tensor: Tensor) -> int:
    """Return a number of the memory that a tensor, or this process's part, lies in."""
    part: Tensor = own_shard(tensor)
    number: int = part.untyped_storage()._cdata
    return number


class WeightQueue:
    """Weight-gradient work of one micro-batch, left by B for W.

    ``with queue:`` makes it the `current_queue` of this thread, for modules that defer
    work by themselves.

    Args:
        lent: memory that is something else's between B and W, as `memory_of` tells it:
            parameters that were gathered for B.
    """

    def __init__(self, lent: Collection[int] = ()) -> None:
        self.lent = lent
        self.n_hooks = hooks_made()
        """Hooks of others when its forward began; None: unknown."""
        self.work: list[_Work] = []
        """In the order in which B has left it."""
        self._has_failed = False
        self._token: Token[WeightQueue | None] | None = None
        self.began_s = 0.0
        """`time.perf_counter` when the pass that runs now began, for emulation."""

    def held_bytes(self) -> int:
        """Memory of all operands that wait for W; what shares memory counts once."""
        tensors = [own_shard(x) for work in self.work for x in work.tensors]
        dense = [x for x in tensors if x is not None and x.layout is torch.strided]
        storages = [x.untyped_storage() for x in dense]
        return sum({x._cdata: x.nbytes() for x in storages}.values())

    def defer(
        self,
        leaves: Sequence[Tensor],
        compute: Callable[[], Sequence[Tensor | None]],
    ) -> None:
        """Keep a call for W.

        Args:
            leaves: that gradients go to.
            compute: returns one for each leaf.
        """
        product = Product(Rule(compute), (), tuple(leaves))
        self.work.append(_Work(product, leaves, (), (), []))

    def read(self, site: Site) -> tuple[list[Tensor], list[Any]]:
        """Read the operands and settings of a product that has not run yet.

        An operand is cut off its graph, which leads to the chunk's input.
        """
        node, product, _ = site
        operands = [getattr(node, name) for name in product.operands]
        operands = [None if x is None else x.detach() for x in operands]
        return operands, [getattr(node, name) for name in product.settings]

    def put(
        self, site: Site, tensors: Sequence[Any], settings: Sequence[Any] = ()
    ) -> None:
        """Keep the work of a product.

        What lies in lent memory is copied: a layer's queries, say, may be parameters.
        """
        if self.lent:
            tensors = [self._own(x) for x in tensors]
        work = _Work(site[1], site[2], tensors, settings, _versions(tensors))
        self.work.append(work)

    def _own(self, x: Tensor | None) -> Tensor | None:
        is_lent = x is not None and memory_of(x) in self.lent
        return x.clone() if is_lent else x  # type: ignore[union-attr]

    def run(self, progress: Progress | None = None, *, in_place: bool = False) -> None:
        """Do all work, and forget it; operands are freed as W proceeds.

        Args:
            progress: told what comes, and what is done.
            in_place: add gradients within the products' own kernels, where there are
                such.

        Raises:
            RuntimeError: an operand was changed in place after B, or an earlier run has
                failed, so that gradients are missing.
        """
        if self._has_failed:
            raise RuntimeError(
                "W has failed before, and its gradients are incomplete; clear them, "
                "and run a new forward, B and W"
            )
        self._has_failed = True
        self.began_s = time.perf_counter()
        if progress is not None:
            leaves = [leaf for work in self.work for leaf in work.product.leaves]
            progress.begin(list(dict.fromkeys(leaves)))
        self.work.reverse()
        has_grad = torch.is_grad_enabled()
        torch.set_grad_enabled(False)  # as `no_grad`, which takes three times as long
        try:
            self._run_all(progress, in_place)
        finally:
            torch.set_grad_enabled(has_grad)
        self._has_failed = False

    def _run_all(self, progress: Progress | None, in_place: bool) -> None:
        together: _Together | None = None
        while self.work:
            work = self.work.pop()
            product, found = work.product, _run_work(work, in_place)
            del work  # its operands are freed before the next work begins
            if found is None:
                if progress is not None:
                    progress.done(product.leaves[0])
                continue
            if together is None:
                left = [product, *(work.product for work in self.work)]
                together = _Together(left, progress)
            together.add(product.leaves, found)
            del found
        if together is not None:
            together.end()

    def run_first(self, n: int, *, in_place: bool = False) -> None:
        """Do up to n works now, as far as W adds them by itself; see `run`."""
        n_alone = 0
        while n_alone < min(n, len(self.work)):
            if self.work[n_alone].product.adds_transposed is None:
                break
            n_alone += 1
        self.work, rest = self.work[:n_alone], self.work[n_alone:]
        self.run(in_place=in_place)
        self.work = rest

    def __enter__(self) -> None:
        self._token = _current.set(self)
        self.began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _current.reset(self._token)


_current: ContextVar[WeightQueue | None] = ContextVar("weight_queue", default=None)


def current_queue() -> WeightQueue | None:
    """The queue of the pass that runs now, if its weight gradients are deferred.

    To be asked for in a forward: on a GPU autograd runs B in a thread of its own, which
    has none.
    """
    return _current.get()


class _Together:
    """Gradients that autograd accumulates, with few calls.

    It gets all gradients of a leaf in one call: they meet there as in a backward.

    Args:
        products: whose gradients may come.
        progress: see `WeightQueue.run`.
    """

    def __init__(self, products: Iterable[Product], progress: Progress | None) -> None:
        self._progress = progress
        self._left = Counter(
            leaf
            for product in products
            if product.adds_transposed is None
            for leaf in product.leaves
        )
        """Gradients to come, of each leaf."""
        self._leaves: dict[Tensor, None] = {}
        self._roots: list[Any] = []
        self._gradients: list[Tensor] = []

    def add(self, leaves: Sequence[Tensor], found: Iterable[tuple[Any, Any]]) -> None:
        """Take gradients of some leaves, and where they enter."""
        for root, gradient in found:
            if gradient is not None:
                is_leaf = isinstance(root, Tensor)
                self._roots.append(root if is_leaf else GradientEdge(*root))
                self._gradients.append(gradient)
        self._leaves.update(dict.fromkeys(leaves))
        self._left.subtract(leaves)
        is_enough = sum([x.nbytes for x in self._gradients]) >= _TOGETHER_BYTES
        if is_enough and all(self._left[leaf] <= 0 for leaf in self._leaves):
            self.end()

    def end(self) -> None:
        """Hand over what there is."""
        if self._roots:
            run_backward(self._roots, self._gradients)
        if self._progress is not None:
            for leaf in self._leaves:
                self._progress.done(leaf)
        self._leaves, self._roots, self._gradients = {}, [], []


def _versions(tensors: Sequence[Any]) -> list[int]:
    """Return how often each tensor was changed in place."""
    return [0 if x is None else x._version for x in tensors]


def _run_work(
    work: _Work, in_place: bool
) -> Sequence[tuple[Any, Tensor | None]] | None:
    """Compute the gradients of one product, and add the only one if that is all to do.

    Returns:
        None, or the gradients that autograd has to accumulate, and where they enter.
    """
    product, edges, tensors, settings, versions = work
    rule, leaves, is_transposed = product.rule, product.leaves, product.adds_transposed
    if _versions(tensors) != versions:
        raise RuntimeError(
            "a tensor that W needs was changed in place after B; change a copy"
        )
    if is_transposed is None or not _only_adds(leaves[0]):
        return list(zip(edges, rule.gradients(*tensors, *settings), strict=False))
    if in_place and _add_in_place(product, tensors, settings):
        return None
    leaf = leaves[0]
    total = leaf.grad
    if total is not None and total.layout is not torch.strided:
        total = None
    if is_transposed and rule.transposed is not None:
        gradient = rule.transposed(*tensors, *settings)
    else:
        gradient = cast(Tensor, rule.gradients(*tensors, *settings)[0])
        gradient = gradient.t() if is_transposed else gradient
    if total is not None and total.dtype == gradient.dtype:
        total.add_(gradient)
    elif leaf.grad is None and gradient.dtype == leaf.dtype == grad_dtype_of(leaf):
        is_alike = gradient.stride() == leaf.stride()
        leaf.grad = gradient if is_alike else torch.empty_like(leaf).copy_(gradient)
    else:
        return [(leaf, gradient)]
    return None


def _add_in_place(
    product: Product, tensors: Sequence[Any], settings: Sequence[Any]
) -> bool:
    """Add a gradient within the product's own kernel; False if that cannot be."""
    is_transposed, add = product.adds_transposed, product.rule.add
    if is_transposed is None or add is None or not _only_adds(product.leaves[0]):
        return False
    total = product.leaves[0].grad
    if total is None or total.layout is not torch.strided:
        return False
    if total.dtype != tensors[0].dtype:
        return False
    add(total.t() if is_transposed else total, *tensors, *settings)
    return True


def _only_adds(leaf: Tensor) -> bool:
    """True if autograd would only add to a leaf: it has no hooks and is not frozen."""
    has_hooks = leaf._backward_hooks or leaf._post_accumulate_grad_hooks
    return leaf.requires_grad and not has_hooks


# ---- The graph of one forward.


class SplitGraph:
    """The graph of one forward, whose backward is run as B, then W.

    Of the outputs only the place in the graph is kept, not the data.

    Args:
        outputs: of the forward; those that need no gradient count for nothing.
        inputs: leaves whose gradients B returns.
        queue: where B leaves its work for W; some may be in it already.
        is_exact: round each weight gradient before it is added, as autograd does.
            False adds that of a matrix, where W does so by itself, within the product's
            own kernel: faster, without a temporary of the weight's size, and different
            in the last bits.
        plans: of the graphs of forwards like this one; they need not be planned again.

    Raises:
        RequestError: an input that requires a gradient is no leaf.
    """

    def __init__(
        self,
        outputs: Iterable[Tensor],
        inputs: Iterable[Tensor] = (),
        queue: WeightQueue | None = None,
        *,
        is_exact: bool = True,
        plans: PlanCache | None = None,
    ) -> None:
        self._ends: list[Any] = []
        self._shapes: list[torch.Size | None] = []
        for y in outputs:  # no comprehension, which costs a call: a part of every F
            if y.requires_grad:
                self._ends.append(_end_of(y))
                self._shapes.append(None if y.is_nested else y.shape)
        self._inputs: list[Tensor] = []
        for x in inputs:
            if x.requires_grad:
                if not x.is_leaf:
                    raise RequestError(
                        "an input of B is no leaf, so its own graph would run in B "
                        "too; run the forward on x.detach().requires_grad_()"
                    )
                self._inputs.append(x)
        if queue is None:
            queue = WeightQueue()
            queue.n_hooks = None  # it does not know when the forward began
        self._queue = queue
        self._is_exact = is_exact
        self._plans = plans
        self._is_done = self._has_deferred = False
        self.outputs: Any = None
        """The function's result, its tensors detached; set by `split_forward`."""

    def report(self, parameters: Iterable[Tensor] = ()) -> dict[Tensor, str]:
        """Name the pass that computes each gradient: ``"W"``, or `IN_B`.

        To be asked before B.

        Args:
            parameters: of the function, which a reentrant checkpoint hides.
        """
        plan = self._plan()
        leaves = [*(p for p in parameters if p.requires_grad), *plan.leaves]
        waiting = [leaf for _, product, _ in plan.sites for leaf in product.leaves]
        return dict.fromkeys(leaves, IN_B) | dict.fromkeys(waiting, "W")

    def defers(self) -> bool:
        """True if B has left work for W, or a module of its own kind has.

        After `backward`: if B would have.
        """
        return self._has_deferred or bool(self._queue.work)

    def held_bytes(self) -> int:
        """Memory that B has left for W: operands of the deferred products.

        It is the least that can be held: for ``y = x w`` both ``x`` and ``dy``.
        """
        return self._queue.held_bytes()

    def backward_input(
        self, gradients: Tensor | Sequence[Tensor | None] | None = None
    ) -> tuple[Tensor | None, ...]:
        """B: the gradients of the inputs, and of all that cannot wait for W.

        The graph is freed, but for what W needs.

        Args:
            gradients: one for each output that requires a gradient, None among them if
                an output has no influence; or None if all outputs are scalars.

        Returns:
            One for each input that requires a gradient; None if it has no influence.

        Raises:
            RuntimeError: B has run already.
            RequestError: the gradients do not fit the outputs; B may be called again.
        """
        ends, dys = self._fitting(gradients)
        plan, queue = self._plan(), self._queue
        self._is_done = True
        found: tuple[Tensor | None, ...] = (None,) * len(self._inputs)
        # A hook that the forward has set on an output would not see what is captured.
        sees_hooks = queue.n_hooks is None or queue.n_hooks != hooks_made()
        may_capture = plan.may_capture and not (sees_hooks or queue.lent)
        if not ends:
            pass
        elif may_capture and all(map(_only_adds, plan.leaves)):
            found = self._capture(plan, ends, dys)
        else:
            with queue:
                found = self._run_around(plan, ends, dys)
        self._ends, self._inputs, self.outputs = [], [], None
        return found

    def backward(
        self, gradients: Tensor | Sequence[Tensor | None] | None = None
    ) -> tuple[Tensor | None, ...]:
        """B and W at once: one full backward, for inputs that are leaves.

        Arguments, result and errors are those of B; W then has nothing to do.
        """
        ends, dys = self._fitting(gradients)
        self._is_done = True
        found: tuple[Tensor | None, ...] = (None,) * len(self._inputs)
        if ends:
            with self._queue:
                if self._is_exact:
                    found = _run_whole(ends, dys, self._inputs)
                else:
                    found = self._run_around(self._plan(), ends, dys, adds=True)
        self._ends, self._inputs, self.outputs = [], [], None
        if self._queue.work:
            self._has_deferred = True
            self.backward_weight()
        return found

    def input_gradients(
        self, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Return what B would, without any gradient for parameters; B may follow.

        Raises:
            RequestError: the gradients do not fit the outputs.
        """
        ends, dys = self._fitting(gradients)
        if not ends or not self._inputs:
            return (None,) * len(self._inputs)
        return torch.autograd.grad(
            ends, self._inputs, dys, retain_graph=True, allow_unused=True
        )

    def backward_weight(self, progress: Progress | None = None) -> None:
        """W: the weight gradients that B has deferred, added to ``.grad``.

        Args:
            progress: told how far it is.

        Raises:
            RuntimeError: B has not run, or not to its end, or an earlier W has failed.
        """
        if not self._is_done or self._ends:
            raise RuntimeError("W runs after B")
        self._queue.run(progress, in_place=not self._is_exact)

    def begin_weight(self, n_left: int) -> None:
        """Do a part of W: what an unfinished B has left so far, or else a share.

        Args:
            n_left: parts of W to come, this one included.
        """
        n_works = len(self._queue.work)
        n = n_works if self._ends else -(-n_works // n_left)
        self._queue.run_first(n, in_place=not self._is_exact)

    def _plan(self) -> Plan:
        edges = [
            end if isinstance(end, GradientEdge) else get_gradient_edge(end)
            for end in self._ends
        ]
        plan = make_plan if self._plans is None else self._plans.plan
        return plan(edges, self._inputs)

    def _fitting(
        self, gradients: Tensor | Sequence[Tensor | None] | None
    ) -> tuple[list[Any], list[Tensor | None]]:
        """Return the ends that have influence, and their gradients."""
        if self._is_done:
            raise RuntimeError("B runs once: its graph is freed; run a new forward")
        shapes = self._shapes
        if gradients is None:
            if any(shape is None or shape.numel() != 1 for shape in shapes):
                raise RequestError(
                    "B needs gradients, one for each output: not all are scalars"
                )
            return self._ends, [None] * len(self._ends)
        if isinstance(gradients, Tensor):
            gradients = (gradients,)
        if len(gradients) != len(shapes):
            raise RequestError(
                f"B was given {len(gradients)} gradients, and {len(shapes)} "
                "outputs require one; give one for each, None where it has no influence"
            )
        ends: list[Any] = []
        dys: list[Tensor | None] = []
        for i, dy in enumerate(gradients):  # without a zip: a part of every B
            if dy is None:
                continue
            shape = shapes[i]
            if shape is not None and dy.shape != shape:
                raise RequestError(
                    f"gradient {i} has the shape {list(dy.shape)}, and its output "
                    f"{list(shape)}"
                )
            ends.append(self._ends[i])
            dys.append(dy)
        return ends, dys

    def _capture(
        self, plan: Plan, ends: list[Any], dys: list[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """B whose gradients are all returned by autograd: nothing calls back."""
        queue, leaves, inputs = self._queue, plan.leaves, self._inputs
        values = [queue.read(site) for site in plan.sites]
        edges = [GradientEdge(site[0], 0) for site in plan.sites]
        found = run_backward(ends, dys, [*inputs, *leaves, *edges], accumulates=False)
        first, first_site = len(inputs), len(inputs) + len(leaves)
        _add_all(leaves, found[first:first_site])
        for i, site in enumerate(plan.sites):
            dy = found[first_site + i]
            if dy is not None:
                operands, settings = values[i]
                queue.put(site, [dy, *operands], settings)
        return found[:first]

    def _run_around(
        self,
        plan: Plan,
        ends: list[Any],
        dys: list[Tensor | None],
        *,
        adds: bool = False,
    ) -> tuple[Tensor | None, ...]:
        """B that keeps operands of a product when autograd comes to it.

        Args:
            plan: of this graph.
            ends: where it starts.
            dys: gradients of these.
            adds: do the work of W at once where W adds in place: the operands are in
                the cache then.
        """
        inputs = self._inputs
        if not plan.sites:
            return _run_whole(ends, dys, inputs)
        hooks = []
        for site in plan.sites:
            node, product, _ = site
            if product.slot is None:
                hook = partial(self._take, site, adds)
                hooks.append(add_hook(node.register_prehook, hook))
            else:
                defer_piece(node, product.slot, partial(self._queue.put, site))
        edges = [GradientEdge(node, 0) for node, *_ in plan.sites]
        learning = [leaf for leaf in plan.leaves if leaf.requires_grad]
        try:
            return _run_whole(ends, dys, inputs, [*learning, *inputs, *edges])
        finally:
            for handle in hooks:
                handle.remove()
            for node, product, _ in plan.sites:
                if product.slot is not None:
                    defer_piece(node, product.slot, None)

    def _take(self, site: Site, adds: bool, dys: Sequence[Tensor | None]) -> None:
        if dys[0] is not None:
            operands, settings = self._queue.read(site)
            tensors = [dys[0], *operands]
            if not (adds and _add_in_place(site[1], tensors, settings)):
                self._queue.put(site, tensors, settings)


def _run_whole(
    ends: list[Any],
    dys: list[Tensor | None],
    inputs: list[Tensor],
    wanted: Sequence[Any] = (),
) -> tuple[Tensor | None, ...]:
    """Run a backward; return the gradients of inputs, and leave their ``.grad`` alone.

    Args:
        ends: where it starts.
        dys: gradients of these.
        inputs: leaves that require a gradient.
        wanted: where it ends; empty: at all leaves.
    """
    before = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    try:
        run_backward(ends, dys, wanted)
        return tuple([x.grad for x in inputs])
    finally:
        for x, grad in zip(inputs, before, strict=True):
            x.grad = grad


def _add_all(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients that autograd has returned, and may have returned twice."""
    totals: list[Tensor] = []
    added: list[Tensor] = []
    first: list[Tensor] = []
    first_gradients: list[Tensor] = []
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is None:
            continue
        total = leaf.grad
        is_sum = total is not None and total.dtype == gradient.dtype
        if total is not None and is_sum and total.layout is gradient.layout is _STRIDED:
            totals.append(total)
            added.append(gradient)
        else:
            first.append(leaf)
            first_gradients.append(gradient)
    if totals:
        torch._foreach_add_(totals, added)
    if first:
        run_backward(first, first_gradients)


_STRIDED = torch.strided


def _end_of(tensor: Tensor) -> Any:
    """Return where a tensor's gradient enters the graph; it holds no data.

    Subclasses and nested tensors, which torch does not describe by their edge alone,
    stand for themselves.
    """
    node = tensor.grad_fn
    is_dense = not tensor.is_nested
    # a node in Python needs a token to live on
    if node is not None and type(tensor) is Tensor and is_dense and is_built_in(node):
        return GradientEdge(node, tensor.output_nr)
    return get_gradient_edge(tensor) if is_plain(tensor) and is_dense else tensor


# ---- Forwards.


class _Alias(torch.autograd.Function):
    """Return an alias of a tensor that is no leaf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


def alias_of(leaf: Tensor) -> Tensor:
    """Return a leaf's data as a tensor that may be changed in place.

    One that needs no gradient may be changed itself.
    """
    if not leaf.requires_grad:
        return leaf
    apply: Any = _Alias.apply  # typed from torch 2.14 on
    return cast(Tensor, apply(leaf))


def split_forward(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> SplitGraph:
    """F: call a module or function, and keep its graph for B and W.

    Args:
        function: what to call.
        *args: its arguments, which it may change in place. Tensors among them that
            require a gradient, also in tuples, lists, dicts, dataclasses and what
            torch's pytree knows, are the inputs of B, in this order.
        **kwargs: its arguments with names; their tensors come after the others.

    Returns:
        The graph; its ``outputs`` are what the function returned, in the same
        containers.

    Raises:
        RequestError: a wrapper of data parallelism would miss the gradients of W, or a
            tensor that needs a gradient is hidden in an object of an unknown kind.
    """
    if isinstance(function, nn.Module):
        check_module(function)
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def take(x: Tensor) -> Tensor:
        inputs.append(x.detach().requires_grad_(x.requires_grad))
        return alias_of(inputs[-1])

    def give(y: Tensor) -> Tensor:
        outputs.append(y)
        return y.detach().requires_grad_(y.requires_grad)

    args = map_tensors(args, take, refuse_hidden)
    kwargs = map_tensors(kwargs, take, refuse_hidden)
    queue = WeightQueue()
    with queue:
        result = function(*args, **kwargs)
    result = map_tensors(result, give, refuse_hidden)
    graph = SplitGraph(outputs, inputs, queue)
    graph.outputs = result
    return graph
