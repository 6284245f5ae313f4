"""B and W as two calls, for any module; this file knows nothing of pipelines.

The backward of a matrix product is two matrix products. Autograd runs both; here B
runs the first, keeps the operands of the second in a queue, and W runs the queue:

    F   y  = x w^T + b
    B   dx = dy w,  db = sum(dy)      keeps (x, dy)
    W   dw = dy^T x                   drops them

F is a plain forward. B is a backward by autograd of everything but the weights that
wait (`plan`). W computes the other half of their products (`products`). It passes each
gradient to autograd where the weight enters its product, so autograd computes casts,
slices, hooks and the sum. Where autograd would only add, W adds by itself. A split
backward and ``loss.backward()`` give the same bits.

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

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from zbpp.core import RequestError
from zbpp.runtime.backward.plan import Plan, PlanCache, Product, Site, grad_dtype_of
from zbpp.runtime.backward.wrappers import check_module
from zbpp.runtime.compiled.backend import defer_piece
from zbpp.runtime.support.autograd_internals import add_hook, hooks_made, run_backward
from zbpp.runtime.support.pytree import map_tensors, refuse_hidden
from zbpp.runtime.support.sharded import own_shard
from zbpp.runtime.support.torch_internals import is_fake

IN_B = "B: no product's weight"
"""In a report: a leaf that some node uses otherwise than as the weight of a product."""

_TOGETHER_BYTES = 4 * 2**20
"""Gradients that one call of autograd accumulates: a call costs up to 0.1 ms with cold
caches, but more gradients need more memory."""


# ---- The work that B leaves for W.


class Progress(Protocol):
    """Receives the progress of W, to sum gradients over replicas meanwhile."""

    sums_each: bool
    """Each micro-batch is summed by itself, which takes its gradients away."""

    def begin(self, leaves: Sequence[Tensor]) -> None:
        """W begins, and will add to these leaves."""

    def done(self, leaf: Tensor) -> None:
        """All gradients of a leaf are added."""

    def rest(self) -> None:
        """Start the sums that have not begun."""


class _Work(NamedTuple):
    """The second half of one product; see `Rule`."""

    product: Product
    edges: Sequence[Any]
    """Where the gradients of its weights go."""
    tensors: Sequence[Any]
    """The gradient of the product, and the operands."""
    settings: Sequence[Any]
    versions: Sequence[int]
    """Of the tensors in B: a change in place raises them."""


def memory_of(tensor: Tensor) -> int:
    """Return a number for the storage of a tensor, or of its shard here."""
    part: Tensor = own_shard(tensor)
    number: int = part.untyped_storage()._cdata
    return number


class WeightQueue:
    """Weight-gradient work of one micro-batch, which B leaves for W.

    Args:
        lent: `memory_of` parameters that are gathered for B, and freed before W.
    """

    def __init__(self, lent: Collection[int] = ()) -> None:
        self.lent = lent
        self.n_hooks = hooks_made()
        """Hooks of the user when the forward began."""
        self.work: list[_Work] = []
        """In the order of B."""

    def read(self, site: Site) -> tuple[list[Tensor], list[Any]]:
        """Read the operands and settings of a product before its backward."""
        node, (rule, *_), _ = site
        operands = [getattr(node, name) for name in rule.operands]
        # their graphs lead to the chunk's input
        operands = [None if x is None else x.detach() for x in operands]
        return operands, [getattr(node, name) for name in rule.settings]

    def put(
        self, site: Site, tensors: Sequence[Any], settings: Sequence[Any] = ()
    ) -> None:
        """Leave the work of a product for W."""
        if self.lent:  # an operand may be a parameter: for example a layer's queries
            lent = [x is not None and memory_of(x) in self.lent for x in tensors]
            tensors = [
                x.clone() if is_lent else x
                for x, is_lent in zip(tensors, lent, strict=True)
            ]
        work = _Work(site[1], site[2], tensors, settings, _versions(tensors))
        self.work.append(work)

    def run(self, progress: Progress | None = None, *, in_place: bool = False) -> None:
        """Do all work, and free its operands one by one.

        With ``in_place`` gradients are added within the products' kernels, where these
        can.
        """
        if progress is not None:
            leaves = [leaf for work in self.work for leaf in work.product.leaves]
            progress.begin(list(dict.fromkeys(leaves)))
        self.work.reverse()
        has_grad = torch.is_grad_enabled()
        torch.set_grad_enabled(False)  # as `no_grad`, which takes three times as long
        sums: list[tuple[GradientEdge, Tensor]] = []
        waiting: dict[Tensor, None] = {}
        try:
            while self.work:
                work = self.work.pop()
                product, pairs = work.product, _run_work(work, in_place)
                del work  # its operands are freed before the next work begins
                if pairs is None:
                    if progress is not None:
                        progress.done(product.leaves[0])
                    continue
                sums += pairs
                del pairs
                waiting.update(dict.fromkeys(product.leaves))
                if sum([gradient.nbytes for _, gradient in sums]) >= _TOGETHER_BYTES:
                    left = [leaf for work in self.work for leaf in work.product.leaves]
                    if waiting.keys().isdisjoint(left):
                        _accumulate(sums, waiting, progress)
            if waiting:
                _accumulate(sums, waiting, progress)
        finally:
            torch.set_grad_enabled(has_grad)


def _versions(tensors: Sequence[Any]) -> list[int]:
    """Count the changes in place of each tensor."""
    return [0 if x is None else x._version for x in tensors]


def _accumulate(
    sums: list[tuple[GradientEdge, Tensor]],
    leaves: dict[Tensor, None],
    progress: Progress | None,
) -> None:
    """Let autograd add all gradients of some leaves, as in one backward."""
    if sums:
        run_backward([edge for edge, _ in sums], [gradient for _, gradient in sums])
    if progress is not None:
        for leaf in leaves:
            progress.done(leaf)
    sums.clear()
    leaves.clear()


def _run_work(work: _Work, in_place: bool) -> list[tuple[GradientEdge, Tensor]] | None:
    """Compute the gradients of one product; return them, with their edges.

    None: they are added, as autograd would only add, too.
    """
    (rule, _, leaves, _, is_transposed), edges, tensors, settings, versions = work
    if _versions(tensors) != versions:
        raise RuntimeError(
            "a tensor that W needs was changed in place after B; change a copy"
        )
    leaf = leaves[0] if is_transposed is not None and _only_adds(leaves[0]) else None
    total = None if leaf is None else leaf.grad
    if in_place and rule.adds and total is not None and total.dtype == tensors[0].dtype:
        total = total.t() if is_transposed else total
        rule.gradients(*tensors, *settings, total=total)
        return None
    gradients = rule.gradients(*tensors, *settings)
    if leaf is not None:
        gradient = cast(Tensor, gradients[0])
        gradient = gradient.t() if is_transposed else gradient
        if total is None and gradient.dtype == leaf.dtype == grad_dtype_of(leaf):
            is_alike = gradient.stride() == leaf.stride()
            leaf.grad = gradient if is_alike else torch.empty_like(leaf).copy_(gradient)
            return None
        if total is not None and total.dtype == gradient.dtype:
            total.add_(gradient)
            return None
    pairs = zip(edges, gradients, strict=False)
    return [(GradientEdge(*edge), dw) for edge, dw in pairs if dw is not None]


def _only_adds(leaf: Tensor) -> bool:
    """True if autograd would only add to a leaf, which has no hooks."""
    has_hooks = leaf._backward_hooks or leaf._post_accumulate_grad_hooks
    is_dense = leaf.grad is None or leaf.grad.layout is torch.strided
    return leaf.requires_grad and is_dense and not has_hooks


# ---- The graph of one forward.


class SplitGraph:
    """The graph of one forward, whose backward is run as B, then W.

    It keeps the edges of the outputs, not their data.

    Args:
        outputs: of the forward; those that need no gradient are ignored.
        inputs: leaves whose gradients B returns.
        queue: for the work of W; modules of the forward may have added some.
        is_exact: round each weight gradient before it is added, as autograd does.
            False lets W add within a product's kernel where it can: faster, without a
            temporary of the weight's size, and different in the last bits.
        plans: of the graphs of similar forwards.

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
        for y in outputs:
            if y.requires_grad:
                # torch needs nested tensors and subclasses themselves
                is_plain = (type(y) is Tensor or is_fake(y)) and not y.is_nested
                self._ends.append(get_gradient_edge(y) if is_plain else y)
        self._inputs: list[Tensor] = []
        for x in inputs:
            if x.requires_grad:
                if not x.is_leaf:
                    raise RequestError(
                        "an input of B is no leaf, so its graph would run in B "
                        "too; run the forward on x.detach().requires_grad_()"
                    )
                self._inputs.append(x)
        if queue is None:
            queue = WeightQueue()
            queue.n_hooks = math.nan  # the forward began earlier
        self._queue = queue
        self._is_exact = is_exact
        self._plans = plans or PlanCache()
        self._is_done = False
        self.defers = False
        """B has left work for W, or would have, before `backward` did it."""
        self.outputs: Any = None
        """The function's result, with detached tensors; set by `split_forward`."""

    def report(self, parameters: Iterable[Tensor] = ()) -> dict[Tensor, str]:
        """Name the pass of each gradient, ``"W"`` or `IN_B`, before B has run.

        Args:
            parameters: of the function, which a reentrant checkpoint hides.
        """
        plan = self._plan()
        leaves = [*(p for p in parameters if p.requires_grad), *plan.leaves]
        waiting = [leaf for _, product, _ in plan.sites for leaf in product.leaves]
        return dict.fromkeys(leaves, IN_B) | dict.fromkeys(waiting, "W")

    def stored_bytes(self) -> int:
        """Memory of the operands that wait for W; shared memory counts once."""
        tensors = [own_shard(x) for work in self._queue.work for x in work.tensors]
        storages = [x.untyped_storage() for x in tensors if x is not None]
        return sum({x._cdata: x.nbytes() for x in storages}.values())

    def backward_input(
        self, gradients: Tensor | Sequence[Tensor | None] | None = None
    ) -> tuple[Tensor | None, ...]:
        """B: the gradients of the inputs, and of all leaves that cannot wait for W.

        It frees the graph, except for the operands of W.

        Args:
            gradients: one for each output that requires a gradient, None among them if
                an output has no influence; or None if all outputs are scalars.

        Returns:
            One for each input that requires a gradient; None if it has no influence.

        Raises:
            RuntimeError: B has run already.
            RequestError, RuntimeError: the gradients do not fit the outputs; B may be
                called again.
        """
        return self._backward(gradients)

    def backward(
        self, gradients: Tensor | Sequence[Tensor | None] | None = None
    ) -> tuple[Tensor | None, ...]:
        """B and W in one full backward; arguments, result and errors as for B."""
        # W may add within its products' kernels, autograd cannot
        input_gradients = self._backward(
            gradients, Plan([], []) if self._is_exact else None
        )
        if self._queue.work:
            self.backward_weight()
        return input_gradients

    def _backward(
        self,
        gradients: Tensor | Sequence[Tensor | None] | None,
        plan: Plan | None = None,
    ) -> tuple[Tensor | None, ...]:
        ends, dys = self._fitting(gradients)
        queue = self._queue
        input_gradients: tuple[Tensor | None, ...] = (None,) * len(self._inputs)
        plan = self._plan() if plan is None else plan
        # a gradient is captured before hooks that the forward has set can change it
        may_capture = plan.may_capture and not queue.lent
        may_capture = may_capture and queue.n_hooks == hooks_made()
        if not ends:
            pass
        elif may_capture and all(map(_only_adds, plan.leaves)):
            input_gradients = self._capture(plan, ends, dys)
        else:
            input_gradients = self._run_around(plan, ends, dys)
        self._ends, self._inputs, self.outputs = [], [], None
        self._is_done, self.defers = True, bool(queue.work)
        return input_gradients

    def input_gradients(
        self, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Return the result of B without gradients of parameters; B may follow."""
        ends, dys = self._fitting(gradients)
        if not ends or not self._inputs:
            return (None,) * len(self._inputs)
        return torch.autograd.grad(
            ends, self._inputs, dys, retain_graph=True, allow_unused=True
        )

    def backward_weight(self, progress: Progress | None = None) -> None:
        """W: the weight gradients that B has deferred, added to ``.grad``.

        Args:
            progress: see `WeightQueue.run`.

        Raises:
            RuntimeError: B has not run, or not to its end.
        """
        if not self._is_done:
            raise RuntimeError("W runs after B")
        self._queue.run(progress, in_place=not self._is_exact)

    def begin_weight(self, n_left: int) -> None:
        """Do one of `n_left` parts of W, or all work of a B that still runs."""
        queue = self._queue
        n = -(-len(queue.work) // n_left) if self._is_done else len(queue.work)
        are_alone = [x.product.adds_transposed is not None for x in queue.work[:n]]
        n = [*are_alone, False].index(False)  # autograd adds the gradients of the rest
        queue.work, rest = queue.work[:n], queue.work[n:]
        queue.run(in_place=not self._is_exact)
        queue.work = rest

    def _plan(self) -> Plan:
        edges = [
            end if isinstance(end, GradientEdge) else get_gradient_edge(end)
            for end in self._ends
        ]
        return self._plans.plan(edges, self._inputs)

    def _fitting(
        self, gradients: Tensor | Sequence[Tensor | None] | None
    ) -> tuple[list[Any], Sequence[Tensor | None]]:
        """Return the ends that have influence, and their gradients."""
        if self._is_done:
            raise RuntimeError("B runs once: its graph is freed; run a new forward")
        if gradients is None:
            return self._ends, [None] * len(self._ends)
        if isinstance(gradients, Tensor):
            gradients = (gradients,)
        if len(gradients) != len(self._ends):
            raise RequestError(
                f"B got {len(gradients)} gradients, and {len(self._ends)} "
                "outputs require one; give one for each, None for no influence"
            )
        for dy in gradients:
            if dy is None:
                pairs = zip(self._ends, gradients, strict=True)
                used = [(end, dy) for end, dy in pairs if dy is not None]
                return [end for end, _ in used], [dy for _, dy in used]
        return self._ends, gradients  # the common case, for speed

    def _capture(
        self, plan: Plan, ends: list[Any], dys: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """B in one call of autograd that returns all gradients, without callbacks."""
        queue, leaves, inputs = self._queue, plan.leaves, self._inputs
        values = [queue.read(site) for site in plan.sites]
        edges = [GradientEdge(site[0], 0) for site in plan.sites]
        results = run_backward(ends, dys, [*inputs, *leaves, *edges], accumulates=False)
        first, first_site = len(inputs), len(inputs) + len(leaves)
        _add_all(leaves, results[first:first_site])
        sites = zip(plan.sites, results[first_site:], values, strict=True)
        for site, dy, (operands, settings) in sites:
            if dy is not None:
                queue.put(site, [dy, *operands], settings)
        return results[:first]

    def _run_around(
        self, plan: Plan, ends: list[Any], dys: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """B with a hook in front of each product, which keeps its operands."""
        inputs = self._inputs
        wanted: list[Any] = []
        undo: list[Callable[[], object]] = []
        for site in plan.sites:
            node, slot = site[0], site[1].rule.slot
            wanted.append(GradientEdge(node, 0))
            if slot is None:
                hook = partial(self._take, site)
                undo.append(add_hook(node.register_prehook, hook).remove)
            else:
                defer_piece(node, slot, partial(self._queue.put, site))
                undo.append(partial(defer_piece, node, slot, None))
        if wanted:  # without any, all leaves are
            wanted += [*inputs, *(x for x in plan.leaves if x.requires_grad)]
        before = [x.grad for x in inputs]
        for x in inputs:
            x.grad = None
        try:
            run_backward(ends, dys, wanted)
            return tuple([x.grad for x in inputs])
        finally:
            for x, grad in zip(inputs, before, strict=True):
                x.grad = grad
            for call in undo:
                call()

    def _take(self, site: Site, dys: Sequence[Tensor | None]) -> None:
        if dys[0] is not None:
            operands, settings = self._queue.read(site)
            self._queue.put(site, [dys[0], *operands], settings)


def _add_all(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients from autograd; one tensor may be that of several leaves."""
    totals: list[Tensor] = []
    added: list[Tensor] = []
    others: dict[Tensor, Tensor] = {}
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is None:
            continue
        total, is_dense = leaf.grad, gradient.layout is torch.strided
        if total is not None and is_dense and total.dtype == gradient.dtype:
            totals.append(total)
            added.append(gradient)
        else:
            others[leaf] = gradient
    if totals:
        torch._foreach_add_(totals, added)
    if others:
        run_backward([*others], [*others.values()])


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

    A leaf that needs no gradient may itself be changed.
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
        function: a module, or any function of tensors.
        *args: its arguments, which it may change in place. Tensors among them that
            require a gradient, also in tuples, lists, dicts and what
            torch's pytree knows, are the inputs of B, in this order.
        **kwargs: its arguments with names; their tensors come after the others.

    Returns:
        The graph; its ``outputs`` are those of the function, in the same
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
    result = function(*args, **kwargs)
    result = map_tensors(result, give, refuse_hidden)
    graph = SplitGraph(outputs, inputs, WeightQueue())
    graph.outputs = result
    return graph
