"""``zbpp mesh``: meshes of stages, replicas and shares in one table."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from zbpp.cli.flags import EFFORT, Numbers
from zbpp.cli.outputs import Terminal
from zbpp.cli.summary import short_memory
from zbpp.core import LayerCosts, Link, RequestError, read_layers
from zbpp.core.replicas import Shard
from zbpp.planning.meshes import MeshPlan, best_mesh, plan_meshes
from zbpp.planning.replicas import Network, network_of
from zbpp.simulator import Table
from zbpp.training.options import (
    Count,
    Memory,
    Microbatches,
    Mode,
    ModelName,
    Switch,
)
from zbpp.training.user_model import load_model


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Compare meshes of stages, replicas and tensor parallelism on so many devices.

    The layers are those of --layers, or of --model.
    """

    devices: Count
    """Number of devices."""
    microbatches: Microbatches
    """Micro-batches of a step, over all replicas."""
    pipeline_schedule_mode: Mode = field(default="auto", kw_only=False)
    layers: Path | None = None
    """Layers file."""
    model: ModelName | None = None
    """A function that returns (model, batch[, loss_fn]), or hf:PATH; estimated."""
    device_flops: float = 2e14
    """With --model: operations of a device per second."""
    memory_limit: Memory | None = None
    """Memory of a device: 40GiB, or in the unit of the costs."""
    shard: Shard = "none"
    """State that replicas shard; each word includes those before."""
    tensor_parallel: Numbers = (1,)
    """Sizes of tensor parallelism; several are compared."""
    replica_bandwidth: float | None = None
    """Bytes per unit of time between devices; default: that of the layers file."""
    node: Count = 1
    """Devices of a node, which have faster links."""
    node_bandwidth: float | None = None
    """Bytes per unit of time between devices of a node."""
    host_bandwidth: float | None = None
    """Bytes per unit of time between a device and its host: adds offload_optimizer."""
    effort: Annotated[str, EFFORT] = "fast"
    json: Switch = False
    """Print one JSON object instead of a table."""

    def run(self, words: Sequence[str]) -> None:
        """Plan all meshes and print them; the best is marked."""
        layers, network = self._layers_and_network()
        meshes = plan_meshes(
            layers,
            n_devices=self.devices,
            n_microbatches=self.microbatches,
            network=network,
            mode=self.pipeline_schedule_mode,
            shard=self.shard,
            effort=self.effort,
            tensor_parallel=self.tensor_parallel,
            host_bandwidth=self.host_bandwidth,
        )
        best = best_mesh(meshes)
        if self.json:
            print(json.dumps({"best": best.name, "meshes": [_data(m) for m in meshes]}))
            return
        title = f"{self.devices} devices, {self.microbatches} micro-batches, shard "
        table = _table(meshes, best, f"{title}{self.shard}")
        Terminal(highlight=False).print(table.for_terminal())
        for mesh in meshes:
            if mesh.plan is None:
                print(f"{mesh.name}: {mesh.reason}")
        print(f"auto: {best.name}")

    def _layers_and_network(self) -> tuple[LayerCosts, Network]:
        if (self.layers is None) == (self.model is None):
            raise RequestError("zbpp mesh needs one of --layers and --model")
        if self.layers is not None:
            layers = read_layers(self.layers).with_limit(self.memory_limit)
        else:
            layers = self._of_model()
        network = network_of(layers)
        if self.replica_bandwidth is not None:
            link = Link(0.0, self.replica_bandwidth)
            if layers.bandwidth is None:
                layers = replace(layers, bandwidth=link.bandwidth, delay=link.alpha)
        elif network is not None:
            link = network.link
        elif self.devices == 1:
            link = Link(0.0, 1.0)  # unused
        else:
            raise RequestError(
                "--replica_bandwidth is missing: the bytes between two devices in a "
                "unit of time, which replicas exchange parameters with"
            )
        if (self.node > 1) != (self.node_bandwidth is not None):
            raise RequestError(
                "--node and --node_bandwidth go together: devices of a node, and the "
                "bytes between two of them in a unit of time"
            )
        near = self.node_bandwidth
        inside = None if near is None else Link(link.alpha, near)
        return layers, Network(link, self.node, inside)

    def _of_model(self) -> LayerCosts:
        """Estimate the memory of a model's layers, and times by their operations."""
        from zbpp.memory.fakes import building
        from zbpp.memory.layers import trace_layers

        assert self.model is not None
        with building():
            user = load_model(self.model)
        layers = trace_layers(user.layered, (user.inputs, user.targets), user.loss_fn)
        times = tuple(n / self.device_flops for n in layers.operations())
        limit = self.memory_limit
        return replace(layers.costs(), f=times, b=times, w=times, memory_limit=limit)


_HEADS = ["pp x dp x tp", "m", "chunks", "step", "for replicas", "bubble", "memory", ""]
_CAPTION = (
    "pp: stages, dp: replicas, tp: devices that share a layer, m: micro-batches of a "
    "replica\nstep: one among many; for replicas: with their collectives\n"
    "memory: of a device; indented: the best mesh with other sums or optimizers"
)


def _table(meshes: Sequence[MeshPlan], best: MeshPlan, title: str) -> Table:
    table = Table(_HEADS, title=title, caption=_CAPTION)
    for mesh in meshes:
        sizes = f"{mesh.n_stages} x {mesh.data_parallel} x {mesh.tensor_parallel}"
        if mesh.plan is None:
            table.add(sizes, look="dim", note=mesh.reason)
            continue
        table.add(
            sizes,
            str(mesh.n_microbatches),
            str(mesh.plan.schedule.placement.n_chunks // mesh.n_stages),
            f"{mesh.step:.6g}",
            f"{mesh.exposed:.6g}",
            f"{mesh.bubble:.2%}",
            short_memory(mesh.peak),
            "<- auto" if mesh is best else "",
            look="bold" if mesh is best else "",
        )
        for name, x in mesh.variants.items() if mesh is best else ():
            figures = f"{x.step:.6g}", f"{x.exposed:.6g}", "", short_memory(x.peak)
            table.add(f"  {name}", "", "", *figures)
    return table


def _data(mesh: MeshPlan) -> dict[str, Any]:
    data: dict[str, Any] = {
        "n_stages": mesh.n_stages,
        "data_parallel": mesh.data_parallel,
        "tensor_parallel": mesh.tensor_parallel,
        "n_microbatches": mesh.n_microbatches,
        "shard": mesh.shard,
    }
    if mesh.plan is None:
        return data | {"reason": mesh.reason}
    return data | {
        "placement": list(mesh.plan.schedule.placement.stage_of),
        "split": list(mesh.plan.split or ()),
        "step": mesh.step,
        "exposed": mesh.exposed,
        "bubble_rate": mesh.bubble,
        "peak_memory": mesh.peak,
        "variants": {
            name: {"step": x.step, "exposed": x.exposed, "peak_memory": x.peak}
            for name, x in mesh.variants.items()
        },
    }
