"""Compare what processes begin with, where a difference would train on wrong sums.

    refusals      of all processes, raised on all           at the start
    settings      of all processes                          before the first step
    weights       of chunks that a function builds          before the first step
    ties          of the stages that hold one               before the first step
    parameters    of the replicas, and plain ones over tp       in the first step
    samples       their numbers in inputs and targets           in the first step

Nobody else would notice: gradients of other parameters are added up as well.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor

from zbpp.core import RequestError
from zbpp.runtime.comm.stage_group import EXPERT_DIM, StageGroup, single_dims
from zbpp.runtime.driver.first_weights import FirstWeights, check_first_weights
from zbpp.runtime.executor import Executor
from zbpp.runtime.microbatches import check_samples
from zbpp.runtime.optim.rollback import copy_groups
from zbpp.runtime.parallel.experts import sharded_dims
from zbpp.runtime.parallel.wrap import Unsharded
from zbpp.runtime.support.errors import PeerError
from zbpp.runtime.support.fingerprint import fingerprints
from zbpp.runtime.support.sharded import layout_of
from zbpp.runtime.ties.plan import NO_TIES, TiePlan

__all__ = [
    "check_agreement",
    "check_chosen",
    "check_first_step",
    "refuse_together",
]

_TENSOR = "tp"
_SHOWN = 3  # names in an error

TiedTexts = Mapping[tuple[int, int], str]
"""Of a tied parameter and its optimizer's options, by (tie, stage)."""

Described = dict[str, tuple[int, tuple[str, ...]]]
"""Fingerprint of each parameter, and the dimensions of the mesh along which processes
hold other parts of it."""


@contextmanager
def refuse_together(gather: Callable[[Any], list[Any]]) -> Iterator[None]:
    """Let the first error of any process within this block end it on all.

    Args:
        gather: gives every process the things of all, by rank.

    Raises:
        RequestError: a process has refused the request: the same on all.
        PeerError: another process has failed.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    told = None
    if error is not None:
        told = isinstance(error, RequestError), type(error).__name__, str(error)
    for rank, first in enumerate(gather(told)):
        if error is not None and first == told:
            raise error
        if first is not None:
            is_request, kind, text = first
            if is_request:
                raise RequestError(text) from error
            text = f"rank {rank} failed at the start: {kind}: {text}"
            raise PeerError(text) from error


def check_agreement(
    executors: Mapping[int, Executor],
    request: object,
    ties: TiePlan = NO_TIES,
    weights: FirstWeights | None = None,
    *,
    seed: int = 0,
) -> int:
    """Compare what the ranks were asked for.

    Args:
        executors: of this process, by stage.
        request: its ``repr`` must be the same in all processes.
        ties: whose parameters must be stepped alike.
        weights: of this process at the start; None: not to be compared.
        seed: of the layers, on this rank.

    Returns:
        The seed of rank 0.

    Raises:
        RequestError: the ranks were asked for different things, are about to step a
            tied parameter differently, or begin with weights of other layers.
    """
    transport = next(iter(executors.values())).transport
    digest = hashlib.sha256(repr((request, ties.ties)).encode()).hexdigest()
    answers = transport.gather((digest, _describe_tied(executors), weights, seed))
    ranks = [
        rank
        for rank, (rank_digest, *_) in enumerate(answers)
        if rank_digest != answers[0][0]
    ]
    if ranks:
        raise RequestError(
            f"rank(s) {ranks} and rank 0 were started with different schedules, "
            "splits or settings; start all ranks with the same arguments"
        )
    _check_tied(ties, [tied for _, tied, _, _ in answers])
    check_first_weights(weights or {} for _, _, weights, _ in answers)
    first_seed: int = answers[0][3]
    return first_seed


def check_chosen(executors: Mapping[int, Executor]) -> str | None:
    """Look whether the optimizers of all stages train anything; all must call.

    Returns:
        A warning, if all parameters are frozen.

    Raises:
        RequestError: parameters could learn, and none of them is stepped.
    """
    transport = next(iter(executors.values())).transport
    chosen = [x.optimizer.optimizers.chosen() for x in executors.values()]
    every = list(chain.from_iterable(transport.gather(chosen)))
    learning = list(dict.fromkeys(name for _, names, _ in every for name in names))
    if any(n for n, _, _ in every) or not any(n for *_, n in every):
        return None
    if not learning:
        return (
            "all parameters of the model are frozen (requires_grad is False), so steps "
            "train nothing; unfreeze some, or call evaluate() and predict()"
        )
    shown = ", ".join(learning[:_SHOWN]) + (", ..." if len(learning) > _SHOWN else "")
    raise RequestError(
        f"optimizer= steps none of the {len(learning)} parameters of the model that "
        f"learn ({shown}); compare these names with those that it looks for, or give "
        "optimizer=None to step yourself"
    )


def _describe_tied(executors: Mapping[int, Executor]) -> TiedTexts:
    """Describe the tied parameters of this process for `_check_tied`."""
    return {
        (number, stage): _describe_copy(executor, tie.parameter)
        for stage, executor in executors.items()
        for number, tie in executor.stage.ties.held.items()
    }


def _describe_copy(executor: Executor, parameter: Tensor) -> str:
    frozen = "" if parameter.requires_grad else "frozen, "
    text = f"{frozen}{tuple(parameter.shape)} {parameter.dtype}"
    if layout := layout_of(parameter):
        _, placements = layout
        text += f" in parts {placements}"
    for optimizer in executor.optimizer.optimizers.all:
        groups = zip(optimizer.param_groups, copy_groups(optimizer), strict=True)
        for group, options in groups:
            if any(p is parameter for p in group["params"]):
                text += f", {type(optimizer).__name__} with {sorted(options.items())}"
    return text


def _check_tied(plan: TiePlan, descriptions: Sequence[TiedTexts]) -> None:
    """Compare what `_describe_tied` has given in all processes.

    Raises:
        RequestError: a parameter differs, or is stepped in another way on a stage.
    """
    for tie in range(len(plan.ties)):
        by_stage = {
            stage: text
            for part in descriptions
            for (number, stage), text in part.items()
            if number == tie
        }
        if len(set(by_stage.values())) > 1:
            texts = "; ".join(f"stage {s}: {by_stage[s]}" for s in sorted(by_stage))
            raise RequestError(
                f"the tied parameter {plan.name(tie)} must be stepped alike on all "
                f"stages that hold it, but there is {texts}: deal it out alike in all "
                "layers, and let the optimizer's builder give its copies equal options"
            )


def check_first_step(
    executors: Mapping[int, Executor], samples: tuple[int | None, int | None]
) -> None:
    """Compare numbers of samples and parameters of all processes; all must call.

    Args:
        executors: of this process, by stage.
        samples: of inputs and targets, where they are read and are to be cut.

    Raises:
        RequestError: they do not go together; the same on every process.
    """
    transport = next(iter(executors.values())).transport
    if transport.is_local:
        return
    peers = transport.peers
    parameters = _describe_parameters(executors, peers) if peers.n > 1 else {}
    every = transport.gather((peers.place, samples, parameters))
    pipelines: dict[Any, list[tuple[int | None, int | None]]] = {}
    for place, counts, _ in every:
        pipelines.setdefault(tuple(place.items()), []).append(counts)
    for stages in pipelines.values():
        rows = [[n for n in row if n is not None] for row in zip(*stages, strict=True)]
        check_samples(*(row[0] if row else None for row in rows))
    _compare_parameters([(place, names) for place, _, names in every])


def _describe_parameters(
    executors: Mapping[int, Executor], peers: StageGroup
) -> Described:
    """The parameters of this process, but for those dealt over another mesh.

    What ``shard`` has dealt out counts as it was before, unless it was loaded since:
    its parts cannot be compared.
    """
    held: dict[str, tuple[Tensor, tuple[str, ...]]] = {}
    before: dict[str, Unsharded] = {}
    for executor in executors.values():
        unsharded = executor.collectives.unsharded
        for _, name, p in executor.stage.named_stepped():
            dims = sharded_dims(p, executor.stage.experts)
            if peers.has_dims(dims):
                held[name] = p, dims
                if p in unsharded:
                    before[name] = unsharded[p]
    numbers = fingerprints(p for p, _ in held.values())
    described = {
        name: (number, dims)
        for (name, (_, dims)), number in zip(held.items(), numbers, strict=True)
    }
    for name, then in before.items():
        if described[name][0] == then.part:
            described[name] = then.fingerprint, then.dims
    return described


def _compare_parameters(every: Sequence[tuple[Mapping[str, int], Described]]) -> None:
    first: dict[Any, tuple[int, int]] = {}
    differ: dict[str, tuple[int, int]] = {}
    for rank, (place, parameters) in enumerate(every):
        for name, (number, dims) in parameters.items():
            key = name, *(place[dim] for dim in single_dims(dims))
            at, expected = first.setdefault(key, (rank, number))
            if number != expected:
                differ.setdefault(name, (at, rank))
    if not differ:
        return
    names = [*differ]
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    a, b = differ[names[0]]
    places = every[a][0], every[b][0]
    if all(places[0][dim] == places[1][dim] for dim in places[0] if dim != _TENSOR):
        raise RequestError(
            f"{shown}: plain parameters that differ between ranks {a} and {b}, which "
            "are neighbours along 'tp', and nothing tells that they are parts of "
            "others; deal them out as DTensors (parallelize_module on mesh['tp']), or "
            "let every process begin with the same"
        )
    raise RequestError(
        f"{shown}: parameters that differ between the replicas on ranks {a} and {b}, "
        "whose gradients would be added up; let every process begin with the same "
        "(seed it before it builds the layers, or load a checkpoint). Experts, which "
        f"are meant to differ, do so along a dimension {EXPERT_DIM!r} and are named: "
        "mesh=zbpp.DataParallel(mesh=zbpp.mesh(stages=..., expert_parallel=...), "
        "expert_parameters=lambda name, parameter: ...); see "
        "docs/how_to/experts_and_context.md"
    )
