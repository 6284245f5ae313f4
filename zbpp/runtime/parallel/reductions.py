"""Start the sum of flat gradients over replicas; see `zbpp.core.reductions`.

The first collective overlaps with other jobs, the rest run when its result is needed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from zbpp.core import RequestError
from zbpp.core.reductions import Reduction, TopK, TwoLevel
from zbpp.runtime.comm.place import Place
from zbpp.runtime.support.sharded import is_sharded

Finish = Callable[[], Tensor]
"""Waits for the sum."""

StartSum = Callable[[Tensor, Sequence[nn.Parameter]], Finish]
"""Starts to sum the flat gradients of some parameters, which it may write to."""


def make_sum(reduction: Reduction, place: Place, dims: Sequence[str]) -> StartSum:
    """Make the function that sums over dimensions; all processes of a stage must call.

    Raises:
        RequestError: the replicas do not fill nodes.
    """
    if isinstance(reduction, TopK):
        assert place.mesh is not None
        return TopKSum(reduction, place.mesh[dims[0]])
    start: Callable[[Tensor], Finish]
    if isinstance(reduction, TwoLevel):
        start = partial(_two_level, *_levels(reduction, place, dims))
    else:
        start = partial(_all_reduce, [place.group(dim) for dim in dims])

    def in_dtype(flat: Tensor, _: object) -> Finish:
        finish, dtype = start(flat.to(reduction.dtype or flat.dtype)), flat.dtype
        return lambda: finish().to(dtype)

    return in_dtype


def _all_reduce(groups: Sequence[dist.ProcessGroup], flat: Tensor) -> Finish:
    first, *others = groups
    work = dist.all_reduce(flat, group=first, async_op=True)

    def finish() -> Tensor:
        _wait(work)
        for group in others:
            _wait(dist.all_reduce(flat, group=group, async_op=True))
        return flat

    return finish


def _two_level(
    inside: dist.ProcessGroup, between: dist.ProcessGroup, flat: Tensor
) -> Finish:
    whole = pad(flat, (0, -len(flat) % inside.size()))
    part = whole.new_empty(len(whole) // inside.size())
    work = dist.reduce_scatter_single(part, whole, group=inside, async_op=True)

    def finish() -> Tensor:
        _wait(work)
        _wait(dist.all_reduce(part, group=between, async_op=True))
        _wait(dist.all_gather_single(whole, part, group=inside, async_op=True))
        return whole[: len(flat)]

    return finish


def _levels(
    reduction: TwoLevel, place: Place, dims: Sequence[str]
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Groups of the replicas in this node, and of those at this place of each node."""
    n, ranks = reduction.ranks_per_node, place.ranks_along(dims)
    nodes = [list(node) for _, node in groupby(ranks, lambda rank: rank // n)]
    inside = next(node for node in nodes if place.rank in node)
    if any(len(node) != len(inside) for node in nodes):
        raise RequestError(
            f"TwoLevel needs as many replicas of a stage in every node, and nodes of "
            f"{n} ranks have {', '.join(map(str, nodes))}; give another "
            "ranks_per_node, or zbpp.Reduction()"
        )
    levels = inside, [node[inside.index(place.rank)] for node in nodes]
    groups = [dist.new_group(x, use_local_synchronization=True) for x in levels]
    return groups[0], groups[1]


class TopKSum:
    """Sums the largest numbers of each replica; the rest is its residual.

    What a step leaves becomes the residual when the step has been decided, unless it
    is skipped. There are no residuals of other scales: there is no loss scale.
    """

    def __init__(self, reduction: TopK, mesh: DeviceMesh) -> None:
        self._reduction, self._mesh = reduction, mesh
        self._residuals: dict[nn.Parameter, Tensor] = {}
        self._next: dict[nn.Parameter, Tensor] = {}

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin with residuals of zero."""
        for p in parameters:
            if p in self._residuals:
                continue
            if is_sharded(p):
                raise RequestError(
                    f"reduction is {self._reduction}, and a parameter of shape "
                    f"{tuple(p.shape)} is a DTensor; leave reduction out"
                )
            dtype = getattr(p, "grad_dtype", None) or p.dtype
            self._residuals[p] = torch.zeros_like(p, dtype=dtype, requires_grad=False)

    def __call__(self, flat: Tensor, parameters: Sequence[nn.Parameter]) -> Finish:
        """Start to sum, and note what is left."""
        self.begin(parameters)
        group, dtype = self._mesh.get_group(), self._reduction.dtype or flat.dtype
        flat += torch.cat([self._residuals[p].reshape(-1) for p in parameters])
        places = flat.abs().topk(math.ceil(self._reduction.share * len(flat))).indices
        values = flat[places].to(dtype)
        flat[places] -= values
        pieces = torch.split(flat, [p.numel() for p in parameters])
        for p, piece in zip(parameters, pieces, strict=True):
            self._next[p] = piece.view(p.shape)
        gathered, works = [], []
        for part in (values, places.int()):
            gathered.append(part.new_empty(group.size(), len(part)))
            into = gathered[-1].view(-1)
            works.append(dist.all_gather_single(into, part, group=group, async_op=True))

        def finish() -> Tensor:
            for work in works:
                _wait(work)
            total = torch.zeros_like(flat)
            for values, places in zip(*gathered, strict=True):
                total.index_add_(0, places, values.to(total.dtype))
            return total

        return finish

    def settle(self, *, skipped: bool) -> None:
        """The step has been decided: go on with what it has left, or with what was."""
        if not skipped:
            self._residuals |= self._next
        self._next = {}

    def residuals(self) -> dict[nn.Parameter, Tensor]:
        """DTensors of the residuals, (replicas, shape of the parameter)."""
        from torch.distributed.tensor import DTensor, Shard

        return {
            p: DTensor.from_local(x[None], self._mesh, [Shard(0)], run_check=False)
            for p, x in self._residuals.items()
        }


def _wait(work: dist.Work) -> None:
    try:
        work.wait()  # a limit would stop the host with NCCL
    except RuntimeError as error:
        raise dist.DistError(str(error)) from error
