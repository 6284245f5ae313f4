"""One micro-batch in flight as three graphs: F, B and W, with memory of their own.

    slot 0   F0  .  .  B0  W0  F3  ...      each of F, B, W recorded when it first runs
    slot 1       F1  .  .  .  B1  W1
    slot 2           F2  ...

A slot is taken by one micro-batch after another, so its graphs always run in the same
order, and may share memory. What a pass is given is copied in, and what it gives is
copied out: so messages, losses and gradients outlive the next micro-batch.

What a graph needs between its kernels lies in a pool. Only CUDA's graphs are made:
other accelerators run their passes without (`torch.accelerator.Graph` is untried).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from zbpp.runtime.backward.accumulate import run_isolated
from zbpp.runtime.backward.grads import add_gradients
from zbpp.runtime.backward.queue import Progress
from zbpp.runtime.backward.split import SplitGraph
from zbpp.runtime.support.autograd_internals import NoGrad
from zbpp.runtime.support.pytree import map_tensors, tensors_in
from zbpp.runtime.values import Tensors

__all__ = ["MakePool", "Pool", "Slot", "Totals", "pools_on"]

Run = Callable[[Tensors, object], tuple[Tensors, SplitGraph]]
"""F, of inputs and targets; returns its outputs, and what B and W are run of."""


class Pool(Protocol):
    """Memory of graphs that always run one after the other, in the same order."""

    def record(self, action: Callable[[], None]) -> Callable[[], None]:
        """Record what an action launches, without running it; return what runs it.

        Raises:
            RuntimeError: it does what no graph can, such as waiting for the device.
        """


MakePool = Callable[[], Pool]


class DevicePool:
    """A pool of a GPU.

    Args:
        stream: records; autograd runs a backward on the stream of its forward, so all
            pools have the same one.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, action: Callable[[], None]) -> Callable[[], None]:
        """See `Pool`. Other threads may use the GPU meanwhile."""
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode=mode
        ):
            action()
        return graph.replay


def pools_on(device: torch.device) -> MakePool | None:
    """Return what makes the pools of one stage; None: the device has no graphs.

    Libraries keep scratch memory for each stream. So stages that compute side by side
    must not record on the same one.
    """
    if device.type != "cuda":
        return None
    return partial(DevicePool, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


class Totals:
    """The sums that a chunk's W graphs add to, in memory that stays.

    Args:
        parameters: of the chunk.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = list(parameters)
        self._own: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def settle(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Make these sums the parameters' gradients, with the values that those have.

        A step's first gradient is added to zeros, which changes no bit but the sign of
        a zero.
        """
        totals = []
        for p in parameters:
            total, grad = self._own.get(p), p.grad
            if total is None:
                like = p if grad is None else grad
                total = self._own[p] = torch.zeros_like(like, requires_grad=False)
            elif grad is None:
                total.zero_()
            if grad is not None and grad is not total:
                total.copy_(grad)
            p.grad = total
            totals.append(total)
        return totals


class Slot:
    """F, B and W of one micro-batch at a time.

    To the order in which gradients are added it is the graph of a forward.

    Args:
        pool: memory of the graphs.
        totals: of the chunk.
        free: called when W has run.
    """

    def __init__(
        self, pool: Pool, totals: Totals, free: Callable[["Slot"], None]
    ) -> None:
        self._pool, self._totals, self._free = pool, totals, free
        self._replays: dict[str, Callable[[], None]] = {}
        self._read: list[Tensor] = []
        self._dy: list[Tensor] = []
        self._outputs: Tensors = ()
        self._dx: Sequence[Tensor | None] = ()
        self._made: tuple[list[Tensor], list[Tensor]] = [], []
        """The parameters whose gradients B computes, and these."""

    @property
    def is_whole(self) -> bool:
        """All its graphs are recorded, so nothing is left of the pass they are of."""
        return "B" in self._replays and ("W" in self._replays or not self._defers)

    def _record(self, kind: str, action: Callable[[], None]) -> None:
        try:
            self._replays[kind] = self._pool.record(action)
        except RuntimeError as error:
            error.add_note(
                f"recording {kind} as a CUDA graph; a layer that waits for the GPU, or "
                "copies to the host, needs a Pipeline without cuda_graphs"
            )
            raise

    def forward(self, taken: Tensors, targets: object, run: Run) -> Tensors:
        """F.

        Args:
            taken: the inputs.
            targets: of the last chunk, for its loss.
            run: called once, to be recorded.

        Returns:
            The outputs, cut off their graph.
        """
        values = [*taken, *tensors_in(targets)]
        if "F" not in self._replays:
            inputs = tuple(_copied(x) for x in taken)
            own_targets = map_tensors(targets, _copied)
            self._read = [*inputs, *tensors_in(own_targets)]

            def record() -> None:
                self._outputs, self._graph = run(inputs, own_targets)

            self._record("F", record)
            self._waiting, self._in_b = self._graph.in_w(), self._graph.in_b()
            self._where, self._defers = self._graph.report(), False
        _fill(self._read, values)
        self._replays["F"]()
        return tuple(map(_copied, self._outputs))

    def backward_input(
        self, gradients: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """B; see `SplitGraph.backward_input`."""
        learning = [y for y in self._outputs if y.requires_grad]
        values = [  # a graph is recorded with a gradient for each output
            torch.zeros_like(y) if dy is None else dy
            for y, dy in zip(learning, gradients, strict=True)
        ]
        if "B" not in self._replays:
            self._dy = [_copied(x) for x in values]
            self._record("B", self._run_b)
            self._defers = self._graph.defers()
        _fill(self._dy, values)
        self._replays["B"]()
        with NoGrad():
            add_gradients(*self._made)
        return tuple(None if x is None else x.clone() for x in self._dx)

    def _run_b(self) -> None:
        self._dx, made = run_isolated(self._graph, self._dy, self._totals.parameters)
        self._made = [p for p, _ in made], [gradient for _, gradient in made]

    def begin_weight(self, n_left: int) -> None:
        """Do nothing yet: W is recorded as one graph."""

    def backward_weight(self, progress: Progress | None = None) -> None:
        """W; see `SplitGraph.backward_weight`.

        Raises:
            RuntimeError: W does more than to add to gradients that are there.
        """
        assert progress is None, "sums of replicas are recorded in no graph"
        if self._defers:
            totals = self._totals.settle(self._waiting)
            if "W" not in self._replays:
                self._record("W", self._graph.backward_weight)
                if any(
                    p.grad is not total
                    for p, total in zip(self._waiting, totals, strict=True)
                ):
                    raise RuntimeError(
                        "W has put new gradients in the place of those that it was to "
                        "add to; train without cuda_graphs"
                    )
            self._replays["W"]()
            for total in totals:  # a replay changes what it does not tell torch of
                torch.autograd.graph.increment_version(total)
        self._free(self)

    def backward(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """BW: B, then W."""
        input_gradients = self.backward_input(gradients)
        self.backward_weight()
        return input_gradients

    def report(self, parameters: Iterable[Tensor] = ()) -> dict[Tensor, str]:
        """See `SplitGraph.report`."""
        return self._where

    def in_b(self) -> list[Tensor]:
        """See `SplitGraph.in_b`."""
        return self._in_b

    def in_w(self) -> list[Tensor]:
        """See `SplitGraph.in_w`."""
        return self._waiting

    def defers(self) -> bool:
        """True if B leaves work for W."""
        return self._defers


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy without a graph, which says whether it needs a gradient."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _fill(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy what a pass is given to where its graph reads it.

    Through ``data``: to autograd, which is not asked again, it is as it was.
    """
    for static, tensor in zip(buffers, values, strict=True):
        static.data.copy_(tensor)
