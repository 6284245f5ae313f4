"""Build transports, layers, optimizers and executors of one process."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from zbpp.core import Pass, PassKind, Placement, Program, Receive, Send, What
from zbpp.runtime.comm.distributed import DistributedTransport
from zbpp.runtime.comm.transport import LocalHub, Transport
from zbpp.runtime.executor import Executor
from zbpp.runtime.optim.stage_optimizer import MakeOptimizer, StageOptimizer
from zbpp.runtime.optim.step_state import StepRules
from zbpp.runtime.partition import Model, build_chunks
from zbpp.runtime.stage import LossFn, Stage

__all__ = ["StageOptions", "build_executors", "make_transports"]


@dataclass(frozen=True)
class StageOptions:
    """Settings of every stage; `zbpp.Pipeline` explains the fields."""

    loss_fn: LossFn
    optimizer: MakeOptimizer | None
    rules: StepRules
    device: torch.device
    autocast: torch.dtype | None
    seed: int | None
    exact_sums: bool = True
    recompute: frozenset[int] = frozenset()


def make_transports(
    programs: Sequence[Program],
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    timeout_s: float,
    first_timeout_s: float,
) -> dict[int, Transport]:
    """The transports of this process's stages: its own, or without a group all."""
    if group is None or dist.get_world_size(group) == 1:
        return dict(enumerate(LocalHub(len(programs)).transports()))
    neighbours = [
        {i.peer for i in program if isinstance(i, Send)} for program in programs
    ]
    sources = [_first_source(program) for program in programs]
    transport = DistributedTransport(
        group,
        neighbours=neighbours,
        sources=sources,
        device=device,
        timeout_s=timeout_s,
        first_timeout_s=first_timeout_s,
    )
    return {transport.stage: transport}


def _first_source(program: Program) -> int | None:
    """Stage whose activations a stage receives first; None: it reads the inputs."""
    first = [
        (i.value.chunk, i.peer)
        for i in program
        if isinstance(i, Receive) and i.value.what is What.ACTIVATION
    ]
    reads_inputs = Pass(PassKind.F, 0, 0) in program
    return None if reads_inputs or not first else min(first)[1]


def build_executors(
    model: Model,
    ranges: Sequence[range],
    placement: Placement,
    transports: dict[int, Transport],
    options: StageOptions,
) -> dict[int, Executor]:
    """Build the layers, the optimizer and the executor of each local stage.

    Raises:
        RequestError: the builder or the sharing of parameters is wrong.
    """
    held = [chunk for stage in transports for chunk in placement.chunks_of[stage]]
    chunks = {chunk.index: chunk for chunk in build_chunks(model, ranges, held)}
    executors = {}
    for stage, transport in transports.items():
        own = [chunks[index] for index in placement.chunks_of[stage]]
        for chunk in own:
            for layer in chunk.layers:
                layer.to(options.device)
        runner = Stage(
            own,
            n_chunks=placement.n_chunks,
            loss_fn=options.loss_fn,
            device=options.device,
            autocast=options.autocast,
            seed=options.seed,
            exact_sums=options.exact_sums,
            recompute=options.recompute,
        )
        share = StageOptimizer(
            runner,
            make_optimizer=options.optimizer,
            n_layers=ranges[-1].stop,
            rules=options.rules,
            background=transport.background,
            is_reporter=stage == 0,
        )
        executors[stage] = Executor(
            runner,
            transport,
            share,
            stage_of=placement.stage_of,
            rank=stage if len(transports) == 1 else 0,
        )
    return executors
