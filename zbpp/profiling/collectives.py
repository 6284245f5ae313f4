"""Times of the collectives of replicas: gathers and sums of each layer.

    shard none      all-reduce of a layer's gradients
    shard others    all-gather of its parameters, reduce-scatter of its gradients,
                    and an all-reduce of the parts where groups hold all shards

Every stage measures at the same time, as in a step. A link between replicas follows
from them: a ring of n processes sends messages of a part in n each (see
`zbpp.core.costs.collectives`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import RequestError
from zbpp.core.costs.collectives import Link, fit_link
from zbpp.core.sharding import Shard
from zbpp.profiling.stopwatch import Stopwatch, spread
from zbpp.runtime.executor import Executor
from zbpp.runtime.parallel.mesh import DATA_DIMS, Place
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
    if place.n_replicas == 1 or place.mesh is None:
        return None
    (executor,) = executors.values()
    layers = [
        (index, [p for p in layer.parameters() if p.requires_grad])
        for chunk in executor.stage.chunks.values()
        for index, layer in chunk.numbered()
    ]
    sizes = {
        index: (sum(own_shard(p).numel() for p in learning), learning[0].dtype)
        for index, learning in layers
        if learning
    }
    groups = _Groups(place, executor.stage.device, rounds)
    executor.transport.gather(None)  # all begin together: they share a network
    times = {size: groups.time(*size, shard) for size in dict.fromkeys(sizes.values())}
    nothing = (0.0, 0.0)
    found = {i: times[sizes[i]] if i in sizes else nothing for i, _ in layers}
    return CollectiveTimes(
        {index: gather for index, (gather, _) in found.items()},
        {index: reduce for index, (_, reduce) in found.items()},
        groups.link(),
    )


class _Groups:
    """Groups of a process along the mesh: that of the shards, and of their copies."""

    def __init__(self, place: Place, device: torch.device, rounds: int) -> None:
        mesh = place.mesh
        assert mesh is not None
        dims = [dim for dim in DATA_DIMS if dim in place.peers.place]
        found = [mesh.get_group(dim) for dim in dims if mesh[dim].size() > 1]
        *self._copies, self._shards = found  # dp_replicate is before dp_shard
        self._n = dist.get_world_size(self._shards)
        self._device = device
        self._watch = Stopwatch(device)
        self._rounds = rounds

    def time(self, count: int, dtype: torch.dtype, shard: Shard) -> tuple[float, float]:
        """Milliseconds of a gather and of a sum of so many numbers."""
        parts = -(-count // self._n)
        whole = torch.zeros(parts * self._n, dtype=dtype, device=self._device)
        if shard == "none":
            return 0.0, self._mean(lambda: self._all_reduce(whole, self._shards))
        part = torch.zeros(parts, dtype=dtype, device=self._device)

        def reduce() -> None:
            dist.reduce_scatter_tensor(part, whole, group=self._shards)
            self._all_reduce(part)

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

    def _all_reduce(self, numbers: Tensor, *groups: dist.ProcessGroup) -> None:
        for group in (*groups, *self._copies):
            dist.all_reduce(numbers, group=group)

    def _mean(self, action: Callable[[], None]) -> float:
        action()
        self._watch.forget()
        for _ in range(self._rounds):
            self._watch.time("collective", action)
        return spread(self._watch.seconds("collective")).mean
