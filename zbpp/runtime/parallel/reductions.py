"""Start the sum of a flat tensor over replicas; see `zbpp.core.reductions`.

The first collective runs alongside other jobs, the rest when its result is needed.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from zbpp.core import RequestError
from zbpp.core.reductions import AnyReduction, TwoLevel
from zbpp.runtime.comm.place import Place

Finish = Callable[[], Tensor]
"""Waits for the sum."""

StartSum = Callable[[Tensor], Finish]
"""Starts to sum a flat tensor, which it may write to."""


def make_sum(reduction: AnyReduction, place: Place, dims: Sequence[str]) -> StartSum:
    """Make the function that sums over dimensions; all processes of a stage must call.

    Raises:
        RequestError: the replicas do not fill nodes.
    """
    if isinstance(reduction, TwoLevel):
        start: StartSum = partial(_two_level, *_levels(reduction, place, dims))
    else:
        start = partial(_all_reduce, [place.group(dim) for dim in dims])

    def in_dtype(flat: Tensor) -> Finish:
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
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // n, []).append(rank)
    inside = nodes[place.rank // n]
    if {len(node) for node in nodes.values()} != {len(inside)}:
        raise RequestError(
            f"TwoLevel needs as many replicas of a stage in every node, and nodes of "
            f"{n} ranks have {', '.join(map(str, nodes.values()))}; give another "
            "ranks_per_node, or zbpp.Reduction()"
        )
    at = inside.index(place.rank)
    levels = inside, [node[at] for node in nodes.values()]
    groups = [dist.new_group(x, use_local_synchronization=True) for x in levels]
    return groups[0], groups[1]


def _wait(work: dist.Work) -> None:
    try:
        work.wait()  # a limit would stop the host with NCCL
    except RuntimeError as error:
        raise dist.DistError(str(error)) from error
