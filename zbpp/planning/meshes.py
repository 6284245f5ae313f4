"""Devices as a mesh of stages, replicas and shares: find that with the shortest step.

    64 devices    pp 1 x dp 64, pp 2 x dp 32, ... pp 64 x dp 1
                  and with layers shared by two: pp 1 x dp 32 x tp 2, ...
    a step        the same micro-batches in all, divided among the replicas

Few stages idle less, many replicas exchange more, and every stage must fit its layers.
Each mesh is planned with its best split of the layers; then the collectives of its
replicas are added and steps are simulated until they repeat. Devices that share layers
are neighbours, then come the replicas of a stage: they share a node if they fit there.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add

from zbpp.core import (
    Collective,
    CollectiveOperation,
    Costs,
    LayerCosts,
    PassKind,
    RequestError,
    Schedule,
    ranges_of,
)
from zbpp.core.reductions import Reduction, TopK, TwoLevel
from zbpp.core.replicas import Shard
from zbpp.planning.answer import Plan
from zbpp.planning.make import make_plan
from zbpp.planning.replicas import (
    Network,
    check_parameters,
    check_replicas,
    on_replicas,
    on_shared_layers,
    replicated,
)
from zbpp.planning.request import PlanRequest
from zbpp.schedules import add_collectives, post_validated
from zbpp.simulator import bubble_rate, peak_memory, simulate, steady_step_time

_REDUCTIONS = {
    "Reduction": Reduction(),
    "TwoLevel": TwoLevel(1),
    "TopK(0.01)": TopK(0.01),
}
"""That are compared; `Network` knows the nodes."""

_EVERY = 100
"""Steps between the averages that are compared."""


@dataclass(frozen=True)
class MeshPlan:
    """A mesh with its plan and figures, or the reason why there is none.

    Args:
        n_stages: stages of a replica (pp).
        data_parallel: replicas of every stage (dp).
        tensor_parallel: devices that share each layer (tp).
        n_microbatches: of each replica, in a step.
        shard: state that replicas shard.
        plan: of one replica, its schedule with its collectives; None: see ``reason``.
        step: time of a step among many; post-validated where the backward is split.
        exposed: part of the step that is there for the replicas' collectives alone.
        bubble: idle share of the slowest stage, 0 to 1.
        peak: largest memory of a device, in the unit of the layers.
        variants: where replicas shard nothing, the mesh with each ``reduction`` of
            `zbpp.DataParallel`, with averages, and with the optimizer in host memory;
            ``step`` counts sums that know of nodes, as NCCL's do.
        reason: why there is no plan.
    """

    n_stages: int
    data_parallel: int
    tensor_parallel: int
    n_microbatches: int
    shard: Shard
    plan: Plan | None = None
    step: float = math.inf
    exposed: float = 0.0
    bubble: float = 0.0
    peak: float = math.inf
    variants: Mapping[str, "MeshPlan"] = field(default_factory=dict)
    reason: str = ""

    @property
    def name(self) -> str:
        """The mesh as text: ``pp 4 x dp 2``, or ``pp 2 x dp 2 x tp 2``."""
        name = f"pp {self.n_stages} x dp {self.data_parallel}"
        n = self.tensor_parallel
        return name if n == 1 else f"{name} x tp {n}"


def plan_meshes(
    layers: LayerCosts,
    *,
    n_devices: int,
    n_microbatches: int,
    network: Network,
    mode: str = "auto",
    shard: Shard = "none",
    effort: str = "fast",
    tensor_parallel: Sequence[int] = (1,),
    host_bandwidth: float | None = None,
) -> list[MeshPlan]:
    """Plan every mesh of some devices whose replicas get equal shares of a step.

    Args:
        layers: times, memories and parameters of the layers; ``limit`` is that of a
            device.
        n_devices: all of them are used.
        n_microbatches: of a step, over all replicas.
        network: among devices that share layers, and among replicas.
        mode: as in `zbpp.plan`.
        shard: state that replicas shard; a single replica has all.
        effort: of the plans.
        tensor_parallel: numbers of devices to share each layer.
        host_bandwidth: bytes to or from host memory in a unit of time; None: no
            optimizer steps there.

    Raises:
        RequestError: a number is wrong, or the layers do not tell their parameters, or
            their messages, where layers are shared.
    """
    for name, value in (("devices", n_devices), ("microbatches", n_microbatches)):
        if value < 1:
            raise RequestError(f"--{name} is {value}; it must be at least 1")
    for n in tensor_parallel:
        if n < 1 or n_devices % n:
            raise RequestError(
                f"--tensor_parallel {n} does not divide {n_devices} devices"
            )
    if n_devices > 1:
        check_replicas(n_devices, shard)
    if any(n_devices > n for n in tensor_parallel):
        check_parameters(layers)
    meshes = []
    for n in tensor_parallel:
        shared, links = on_shared_layers(layers, n, network), network.among(n)
        n_groups = n_devices // n
        for n_stages in range(1, n_groups + 1):
            replicas, left = divmod(n_groups, n_stages)
            if left:
                continue
            m = n_microbatches // replicas
            mesh = MeshPlan(n_stages, replicas, n, m, shard if replicas > 1 else "none")
            try:
                if n_microbatches % replicas:
                    raise RequestError(
                        f"{n_microbatches} micro-batches do not divide among "
                        f"{replicas} replicas"
                    )
                mesh = _planned(mesh, shared, links, mode, effort, host_bandwidth)
            except RequestError as error:
                mesh = replace(mesh, reason=str(error).partition("\n")[0])
            meshes.append(mesh)
    return meshes


def best_mesh(plans: list[MeshPlan]) -> MeshPlan:
    """Choose the shortest step, with fewer replicas where steps are equal.

    Raises:
        RequestError: no mesh has a plan.
    """
    planned = [mesh for mesh in plans if mesh.plan is not None]
    if not planned:
        most = max(plans, key=lambda mesh: mesh.n_stages)
        raise RequestError(
            f"none of {len(plans)} meshes fits; {most.name}: {most.reason}"
        )
    return min(
        planned, key=lambda mesh: (mesh.step, mesh.tensor_parallel, mesh.data_parallel)
    )


def _planned(
    mesh: MeshPlan,
    layers: LayerCosts,
    network: Network,
    mode: str,
    effort: str,
    host_bandwidth: float | None,
) -> MeshPlan:
    """Plan a mesh."""
    n, shard = mesh.data_parallel, mesh.shard
    plan = make_plan(
        PlanRequest(
            schedule=mode,
            n_stages=mesh.n_stages,
            n_microbatches=mesh.n_microbatches,
            costs=_any_stages(on_replicas(layers, n, network, shard)),
            effort=effort,
        )
    )
    bare, split = plan.schedule, plan.split
    assert split is not None
    schedule = replicated(bare, data_parallel=n, shard=shard)
    peak = max(peak_memory(simulate(schedule, plan.costs), plan.costs))

    def costs_of(layers: LayerCosts) -> Costs:
        return _any_stages(replace(layers, memory_limit=None)).on(
            bare.placement,
            split,
            n_microbatches=bare.n_microbatches,
            recompute=plan.recompute,
        )

    bare = bare.without(Collective)
    alone = replace(costs_of(layers), optimizer=plan.costs.optimizer)
    step, step_alone = _step(schedule, plan.costs), _step(bare, alone)

    variants = {}
    of_mesh = _variants(layers, network, n, bare, split, host_bandwidth)
    for name, orders, of, more in of_mesh if shard == "none" else ():
        costs = costs_of(of)
        longer = _step(orders, costs) + more
        variants[name] = replace(
            mesh,
            step=longer,
            exposed=longer - step_alone,
            peak=max(peak_memory(simulate(orders, costs), costs)),
        )
    return replace(
        mesh,
        plan=replace(plan, schedule=schedule),
        step=step,
        exposed=max(0.0, step - step_alone),
        bubble=bubble_rate(simulate(bare, alone)),
        peak=peak,
        variants=variants,
    )


def _variants(
    layers: LayerCosts,
    network: Network,
    n: int,
    schedule: Schedule,
    split: Sequence[int],
    host_bandwidth: float | None,
) -> Iterator[tuple[str, Schedule, LayerCosts, float]]:
    """Names, orders, costs, and times that are not in the costs, of n replicas."""
    sizes, fixed = layers.of("parameters"), layers.of("m_fixed")
    two_more = tuple(both + 2 * size for both, size in zip(fixed, sizes, strict=True))
    if n > 1:
        summed = replicated(schedule, data_parallel=n, shard="none")
        for name, reduction in _REDUCTIONS.items():
            sums = tuple(network.sum_time(reduction, size, n) for size in sizes)
            memory = two_more if isinstance(reduction, TopK) else fixed  # residuals
            yield (
                name,
                summed,
                replace(layers, reduce_scatter=sums, m_fixed=memory),
                0.0,
            )
        ranges, stages = ranges_of(split), schedule.placement.chunks_of
        largest = max(sum(sizes[i] for c in x for i in ranges[c]) for x in stages)
        mean = network.time(CollectiveOperation.ALL_REDUCE, largest, n) / _EVERY
        yield f"Periodic(every={_EVERY})", schedule, layers, mean
        outer = replace(layers, m_fixed=two_more)
        yield f"DiLoCo(every={_EVERY})", schedule, outer, mean
    if host_bandwidth is not None:
        copies = tuple(size / host_bandwidth for size in sizes)
        here = tuple(map(min, fixed, (2 * size for size in sizes)))
        costs = replace(
            on_replicas(layers, n, network, "none"),
            all_gather=copies,
            m_fixed=here,
            peak_o=0.0,
        )
        if n == 1:
            costs = replace(costs, reduce_scatter=copies)
        else:  # gradients leave at the end of the step
            total = tuple(map(add, costs.of("optimizer"), copies))
            costs = replace(costs, optimizer=total)
        orders = add_collectives(schedule, shards=True, reduces="last")
        yield "offload_optimizer", orders, costs, 0.0


def _step(schedule: Schedule, costs: Costs) -> float:
    if schedule.runs(PassKind.W) and schedule.n_stages > 1:
        schedule = post_validated(schedule)
    return steady_step_time(schedule, costs)


def _any_stages(layers: LayerCosts) -> LayerCosts:
    """Take the slowest link for all, and the least limit: lists are of other stages."""
    worst = {"bandwidth": min, "delay": max, "memory_limit": min}
    lists = {
        name: choose(values)
        for name, choose in worst.items()
        if isinstance(values := getattr(layers, name), tuple) and values
    }
    return replace(layers, **lists)
