"""Small trainings on the simulated device, and the runs that they must equal.

A scenario is the work of a user's script between its steps: it changes its batches as
soon as a step has begun, makes them on the GPU, evaluates, loads, reads times or
gradients. What the host must not wait for is watched: from the fourth step on a call
that holds it up is an error, and so is a copy of memory that is not pinned.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from cases import NUMBERS, Case, Shown, make, run
from gpu_waits import waits_are_errors
from torch import Tensor

import simgpu
import zbpp
from zbpp import diagnostics
from zbpp.averaging import DiLoCo

__all__ = ["ONE_PROCESS", "PROCESSES", "Scenario", "train"]

WARM_UP = 3
"""Steps in which the host may wait: buffers are watched."""


@dataclass(frozen=True, kw_only=True)
class Scenario(Case):
    """A training with steps that are clipped, and rolled back where that comes late.

    Args:
        n_processes: that train.
        source: of batches: ``"host"``, ``"pinned"`` memory, or ``"gpu"``: the caller's
            stream makes them.
        shard: of two replicas, each with its share of the batch, what they shard, or
            ``"buffers"`` that alternate; ``"apart"``: two pipelines that are averaged.
        reduction: of replicas.
        reads_times: after each step, before its result.
        optimizes: the caller's stream steps.
        overflows: the third batch.
        closes: the pipeline while its last step is under way.
    """

    mode: str
    steps: int = 5
    clip: float | None = 0.7
    post_validation: bool | None = True
    device: str = "cuda"
    timeout_s: float = 30.0
    n_processes: int = 1
    source: str = "host"
    shard: str | None = None
    reduction: zbpp.Reduction | None = None
    reads_times: bool = False
    optimizes: bool = False
    overflows: bool = False
    closes: bool = False

    @property
    def reference(self) -> "Scenario":
        """What must give the same numbers, where everything runs at once.

        Replicas add up in another order: their reference is 1F1B in the same processes.
        """
        if self.shard is not None:
            return replace(self, mode="1F1B")
        names = (*NUMBERS, "source", "optimizes", "overflows", "closes")
        numbers = {name: getattr(self, name) for name in names}
        return Scenario(mode="FThenB", n_stages=1, post_validation=None, **numbers)

    @property
    def mesh(self) -> Any:
        """Of two replicas."""
        return zbpp.mesh(stages=self.n_processes // 2, data_parallel=2)

    def place(self) -> dict[str, Any]:
        """The mesh of replicas or of neighbours along ``tp``, if there are any."""
        if self.partition_activations:
            n_stages = self.n_processes // 2
            return {"mesh": zbpp.mesh(stages=n_stages, tensor_parallel=2)}
        if self.shard is None:
            return super().place()
        mesh = self.mesh
        if self.shard == "apart":
            return {"mesh": mesh["pp"]}
        options: dict[str, Any] = {"shard": self.shard}
        if self.reduction is not None:
            options["reduction"] = self.reduction
        if self.shard == "buffers":
            options = {"shard": "parameters", "alternating_buffers": True}
        return {"mesh": zbpp.DataParallel(mesh=mesh, **options)}

    def batch(self, step: int) -> tuple[Any, Tensor]:
        inputs, targets = super().batch(step)
        return inputs * float(
            "inf"
        ) if self.overflows and step == 2 else inputs, targets

    def share(self, pipeline: zbpp.Pipeline, *batch: Any) -> tuple[Any, ...]:
        """The part of a replica, from where the batch comes from."""
        share = batch
        if self.shard is not None:  # the ranks of a stage follow one another
            share = tuple(x.tensor_split(2)[dist.get_rank() % 2] for x in batch)
        if self.source != "host":
            share = tuple(x.pin_memory() for x in share)
        if self.source == "gpu":
            share = tuple(mixed(x.to("cuda", non_blocking=True)) for x in share)
        return share

    @contextmanager
    def around(self, pipeline: zbpp.Pipeline, step: int) -> Iterator[None]:
        """Within this, waits of the host are errors; the work of the caller."""
        before, goes_on = _copies_in_vain(), self.switch or self.resume
        does_more = self.overflows or self.optimizes or self.reads_times
        if self.shard == "apart":
            does_more = True
            if step == 0:
                pipeline.average(DiLoCo(every=2), self.mesh["dp"])
        if step < WARM_UP or goes_on or does_more:
            yield
        else:
            with waits_are_errors():
                yield
            assert _copies_in_vain() == before, "a copy of memory that is not pinned"
        if self.reads_times:
            for row in diagnostics.timeline(pipeline).rows:
                assert all(slot.end >= slot.start for slot in row)
            for executor in pipeline.stages.executors.values():
                executor.times.norm_seconds()
        if self.optimizes:
            parameters = [p for _, p in pipeline.named_parameters()]
            torch.optim.SGD(parameters, lr=0.1).step()

    def predict(self, pipeline: zbpp.Pipeline) -> Any:
        """Outputs on all ranks; nothing of replicas, whose outputs differ.

        No graph holds what is sent meanwhile.
        """
        outputs = pipeline.predict(self.of.batch(98, 8)[0], everywhere=True)
        return None if self.shard is not None else outputs


def mixed(x: Tensor) -> Tensor:
    """Work of the caller's stream, which takes long."""
    for _ in range(4):
        x = (x * 3 + 1) % 11
    return x


def _copies_in_vain() -> int:
    return sum(n for name, n in simgpu.counts().items() if "not pinned" in name)


def train(of: Scenario) -> Shown:
    """Train as a script does, which overwrites each batch once its step has begun."""
    if of.shard == "apart":
        return {f"{dist.get_rank() % 2}: {name}": x for name, x in run(of).items()}
    if not of.closes:
        return run(of) | ({} if of.shard is None else {"each": None})
    with make(of) as pipeline:
        parameters = dict(pipeline.named_parameters())
        for step in range(of.steps):
            pipeline.step(*of.share(pipeline, *of.batch(step)))
    # by the caller's stream, which the host then waits for, and no other
    return {name: p.detach().cpu() for name, p in parameters.items()}


OF_GPU = {"source": "gpu"}
ON_HOST: dict[str, Any] = {"offload_optimizer": True, "optimizer": "AdamW fused"}
ONE_PROCESS = {
    "ZBV": Scenario(mode="ZBV"),
    "ZBH1": Scenario(mode="ZBH1"),
    "ZBH1, batches of the GPU": Scenario(mode="ZBH1", **OF_GPU),
    "1F1B, pinned batches": Scenario(mode="1F1B", source="pinned"),
    "ZBV, optimizer of the user": Scenario(
        mode="ZBV", optimizer=None, clip=None, post_validation=None, optimizes=True
    ),
    "ZBH1, dropout": Scenario(mode="ZBH1", model="lm dropout"),
    "ZBH1, times": Scenario(mode="ZBH1", reads_times=True),
    "DualPipeV, points": Scenario(mode="DualPipeV", model="exchange"),
    "DualPipeV, points of the GPU": Scenario(
        mode="DualPipeV", model="exchange", **OF_GPU
    ),
    "ZBV, closed at once": Scenario(mode="ZBV", closes=True),
    "ZBV, loss scale": Scenario(
        mode="ZBV", model="vectors", loss_scale=8.0, overflows=True
    ),
    "VPP, snapshots": Scenario(mode="VPP", snapshots=True),
    "ZBH2, barrier": Scenario(mode="ZBH2", post_validation=False),
    "ZBV, recompute": Scenario(mode="ZBV", recompute="all"),
    "1F1B, recompute, points": Scenario(
        mode="1F1B", model="exchange, dropout", recompute="all"
    ),
    "ZB, segments": Scenario(mode="ZB", model="exchange, dropout", parts=True),
    "ZBH1, switches": Scenario(mode="ZBH1", switch="ZBH1"),
    "1F1B, resumed": Scenario(mode="1F1B", resume=("1F1B", 2)),
    "ZBV, resumed": Scenario(mode="ZBV", resume=("ZBV", 2)),
    "1F1B, fused": Scenario(mode="1F1B", optimizer="AdamW fused"),
    "ZBV, on the host": Scenario(mode="ZBV", **ON_HOST),
    "1F1B, on the host": Scenario(mode="1F1B", **ON_HOST),
    "VPP, on the host, tied": Scenario(mode="VPP", model="lm tied", **ON_HOST),
    "ZBH2, on the host, barrier": Scenario(
        mode="ZBH2", post_validation=False, **ON_HOST
    ),
    "ZBV, on the host, scaled": Scenario(
        mode="ZBV", model="vectors", loss_scale=8.0, overflows=True, **ON_HOST
    ),
    "ZBV, on the host, resumed": Scenario(mode="ZBV", resume=("ZBV", 2), **ON_HOST),
    "ZBH2, checkpoint": Scenario(mode="ZBH2", model="checkpoints"),
    "VHalf, 16 bits": Scenario(mode="VHalf", autocast=True),
    "VHalf, buffers": Scenario(mode="VHalf", model="norms"),
    "1F1B, buffers": Scenario(mode="1F1B", model="norms", **OF_GPU),
    "ZBH2, tied ends": Scenario(mode="ZBH2", model="lm tied"),
    "ZBV, tokens": Scenario(mode="ZBV", weigh="tokens"),
}
PROCESSES = {
    name: replace(scenario, n_processes=n)
    for n, scenarios in {
        2: {
            "ZBV, 2 processes": Scenario(mode="ZBV"),
            "1F1B, 2 processes": Scenario(mode="1F1B", **OF_GPU),
            "two tensors": Scenario(mode="ZBH1", model="tuples", split=(7, 1)),
            "ZBV closed at once": Scenario(mode="ZBV", closes=True),
            "replicas": Scenario(mode="1F1B", shard="none"),
            "replicas, tied": Scenario(mode="1F1B", model="lm tied", shard="none"),
            "replicas, TopK": Scenario(
                mode="ZBH1", shard="none", reduction=zbpp.TopK(0.2)
            ),
            "shards": Scenario(mode="1F1B", shard="parameters"),
            "shards, buffers": Scenario(mode="1F1B", shard="buffers"),
            "ZBH1, 2 processes": Scenario(mode="ZBH1", **OF_GPU),
            "ZBH1, tied ends": Scenario(mode="ZBH1", model="lm tied"),
            "ZBH2 switches": Scenario(mode="ZBH2", switch="ZBH2"),
            "ZBV, on the host": Scenario(mode="ZBV", **ON_HOST),
            "shards, on the host": Scenario(mode="1F1B", shard="parameters", **ON_HOST),
            "replicas, on the host": Scenario(mode="1F1B", shard="none", **ON_HOST),
            "VHalf, barrier": Scenario(mode="VHalf", post_validation=False),
        },
        4: {
            "VPP, 4 processes": Scenario(mode="VPP"),
            "1F1B, snapshots": Scenario(mode="1F1B", snapshots=True),
            "ZBV, recompute, 4 processes": Scenario(mode="ZBV", recompute="all"),
            "ZBV, recompute, slices": Scenario(
                mode="ZBV", recompute="all", partition_activations=True
            ),
            "replicas of stages": Scenario(mode="ZBH2", shard="none"),
            "replicas of stages, tied": Scenario(
                mode="VPP", model="lm tied", shard="none"
            ),
            "replicas of stages, two levels": Scenario(
                mode="ZBV", shard="none", reduction=zbpp.TwoLevel(2)
            ),
            "averages of stages": Scenario(mode="ZBV", shard="apart"),
            "optimizer shards": Scenario(mode="ZBV", shard="optimizer"),
            "gradient shards": Scenario(mode="ZBH1", shard="gradients"),
            "parameter shards": Scenario(mode="ZBH2", shard="parameters"),
            "two buffers": Scenario(mode="ZBV", shard="buffers"),
        },
    }.items()
    for name, scenario in scenarios.items()
}
