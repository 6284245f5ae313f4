"""Times of the collectives of replicas: gathers and sums of each layer.

    shard none      all-reduce of a layer's gradients
    shard others    all-gather of its parameters, reduce-scatter of its gradients,
                    and an all-reduce of the parts where groups hold all shards

Experts of a layer are summed and gathered by themselves, over fewer processes.
Every stage measures at the same time, as in a step. A link between replicas follows
from them: a ring of n processes sends messages of a part in n each (see
`zbpp.core.costs.collectives`).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.core.costs.collectives import Link, fit_link
from zbpp.core.sharding import Shard
from zbpp.profiling.stopwatch import Stopwatch, spread
from zbpp.runtime.comm.stage_group import EXPERT_DIM
from zbpp.runtime.executor import Executor
from zbpp.runtime.parallel.experts import kept_dims
from zbpp.runtime.parallel.mesh import Place, shard_mesh
from zbpp.runtime.support.sharded import own_shard

__all__ = ["CollectiveTimes", "time_collectives"]

_SIZES = (2**12, 2**20)
"""Bytes of the messages that the link is found from."""


@dataclass(frozen=True)
class CollectiveTimes:
    """Times in ms, by layer of a stage, and the link that messages tell.

    ``link``, in ms and bytes, is None where larger messages took no longer.
    """

    all_gather: Mapping[int, float]
    reduce_scatter: Mapping[int, float]
    link: Link | None


def time_collectives(
    executors: Mapping[int, Executor], place: Place, shard: Shard, rounds: int
) -> CollectiveTimes | None:
    """Time the collectives of this process's stage (every rank must call).

    Args:
        executors: of this process.
        place: of this process.
        shard: what replicas would share, whatever they do now.
        rounds: to count, after one for warming up.

    Returns:
        None without replicas.
    """
    if place.n_summands == 1 or place.mesh is None:
        return None
    (executor,) = executors.values()
    stage = executor.stage
    sizes = {
        index: _numbers(layer.parameters(), stage.experts)
        for chunk in stage.chunks.values()
        for index, layer in chunk.numbered()
    }
    groups = {
        is_expert: _Groups(place, stage.device, rounds, kept)
        for is_expert, kept in ((False, ()), (True, (EXPERT_DIM,)))
        if place.sum_dims(kept)
    }
    executor.transport.gather(None)  # all begin together: they share a network
    every = dict.fromkeys(size for of_layer in sizes.values() for size in of_layer)
    times = {
        size: groups[size.is_expert].time(size.n, size.dtype, shard)
        for size in every
        if size.is_expert in groups
    }
    layer_times = {
        index: [times[size] for size in of_layer if size in times]
        for index, of_layer in sizes.items()
    }
    return CollectiveTimes(
        {i: sum(gather for gather, _ in pairs) for i, pairs in layer_times.items()},
        {i: sum(reduce for _, reduce in pairs) for i, pairs in layer_times.items()},
        groups[False].link(),
    )


class _Numbers(NamedTuple):
    """Numbers of a layer that are summed over the same processes."""

    n: int
    dtype: torch.dtype
    is_expert: bool


def _numbers(
    parameters: Iterable[nn.Parameter], experts: Collection[Tensor]
) -> list[_Numbers]:
    learning = [p for p in parameters if p.requires_grad]
    kinds = {p: EXPERT_DIM in kept_dims(p, experts) for p in learning}
    sizes = []
    for is_expert in (False, True):
        of_kind = [p for p in learning if kinds[p] == is_expert]
        if of_kind:
            n = sum(own_shard(p).numel() for p in of_kind)
            sizes.append(_Numbers(n, of_kind[0].dtype, is_expert))
    return sizes


class _Groups:
    """Groups of a process along the mesh: that of the shards, and of their copies.

    Args:
        place: of this process.
        device: of this process.
        rounds: to count.
        kept: dimensions along which each process has parameters of its own.
    """

    def __init__(
        self,
        place: Place,
        device: torch.device,
        rounds: int,
        kept: Collection[str] = (),
    ) -> None:
        assert place.mesh is not None
        mesh = shard_mesh(place.mesh, kept)
        assert mesh is not None
        groups = [group for group in mesh.get_all_groups() if group.size() > 1]
        *self._copies, self._shards = groups  # dp_replicate is before dp_shard
        self._sums = place.sum_groups(kept)
        self._n = dist.get_world_size(self._shards)
        self._device = device
        self._watch = Stopwatch(device)
        self._rounds = rounds

    def time(self, count: int, dtype: torch.dtype, shard: Shard) -> tuple[float, float]:
        """Milliseconds of a gather and of a sum of so many numbers."""
        parts = -(-count // self._n)
        whole = torch.zeros(parts * self._n, dtype=dtype, device=self._device)
        if shard == "none":
            return 0.0, self._mean(lambda: self._all_reduce(whole, self._sums))
        part = torch.zeros(parts, dtype=dtype, device=self._device)

        def reduce() -> None:
            dist.reduce_scatter_tensor(part, whole, group=self._shards)
            self._all_reduce(part, self._copies)

        return self._mean(lambda: self._gather(whole, part)), self._mean(reduce)

    def link(self) -> Link | None:
        """The link of a ring that would gather in the times that gathers take."""
        messages = []
        for n_bytes in _SIZES:
            part = torch.zeros(n_bytes, dtype=torch.uint8, device=self._device)
            whole = torch.zeros(n_bytes * self._n, dtype=torch.uint8).to(self._device)
            took = self._mean(partial(self._gather, whole, part))
            messages.append((float(n_bytes), took / (self._n - 1)))
        try:
            return fit_link(messages)
        except RequestError:
            return None

    def _gather(self, whole: Tensor, part: Tensor) -> None:
        dist.all_gather_into_tensor(whole, part, group=self._shards)

    def _all_reduce(self, numbers: Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
        for group in groups:
            dist.all_reduce(numbers, group=group)

    def _mean(self, action: Callable[[], None]) -> float:
        action()
        self._watch.forget()
        for _ in range(self._rounds):
            self._watch.time("collective", action)
        return spread(self._watch.seconds("collective")).mean
