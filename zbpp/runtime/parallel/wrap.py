"""Wrap layers as ``shard`` asks, one `fully_shard` a layer.

none         every replica has all of a stage
optimizer    parameters and optimizer state in parts; whole from a chunk's first F
             to its last B, and its gradients to the last W (ZeRO 1)
gradients    gradients in parts as well: reduced after every W (ZeRO 2)
parameters   parameters whole for a pass only (ZeRO 3)
"""

from collections.abc import Iterable, Iterator, Set

from torch import nn

from zbpp.core import RequestError
from zbpp.core.reductions import Reduction, TopK
from zbpp.core.replicas import SHARDS
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.comm.place import EXPERT_DIM, Place
from zbpp.runtime.parallel.experts import experts_in
from zbpp.runtime.parallel.mesh import shard_mesh
from zbpp.runtime.parallel.pieces import ALIGNED_BYTES
from zbpp.runtime.policies import DataParallel, check_count
from zbpp.runtime.support.fsdp import units_in


def check_replicas(
    replicas: DataParallel, place: Place, *, loss_scale: object = None
) -> None:
    """Refuse a way in which replicas cannot share, or sum."""
    shard, reduction = replicas.shard, replicas.reduction
    if shard not in SHARDS:
        choices = ", ".join(map(repr, SHARDS))
        raise RequestError(f"shard is {shard!r}; choose one of {choices}")
    if shard != "none" and not place.sum_dims():
        raise RequestError(
            f"shard is {shard!r}, and there is one replica only; give a mesh "
            "whose dimension 'dp' is 2 or more"
        )
    if replicas.alternating_buffers and shard != "parameters":
        raise RequestError(
            f"alternating_buffers store layers during one pass, and shard is "
            f"{shard!r}, which keeps them whole for longer; give shard='parameters'"
        )
    n_bytes = replicas.gather_piece_bytes
    check_count("gather_piece_bytes", n_bytes)
    if n_bytes and (
        n_bytes % ALIGNED_BYTES or shard == "none" or replicas.alternating_buffers
    ):
        raise RequestError(
            f"gather_piece_bytes is {n_bytes}; give a multiple of {ALIGNED_BYTES}, a "
            "shard= that divides parameters, and no alternating_buffers"
        )
    if not isinstance(reduction, Reduction):
        raise RequestError(
            f"reduction is {reduction!r}; give a zbpp.Reduction, zbpp.TwoLevel "
            "or zbpp.TopK"
        )
    reason, dims = None, place.sum_dims()
    if reduction != Reduction() and shard != "none":
        reason = (
            f"with shard={shard!r} fully_shard sums (on two levels: "
            "zbpp.mesh(replicate=...); another dtype: fully_shard(mp_policy=...))"
        )
    elif type(reduction) is not Reduction and len(dims) > 1:
        reason = f"it is over one dimension of the mesh; this one has {', '.join(dims)}"
    elif isinstance(reduction, TopK) and loss_scale is not None:
        reason = "its residuals have one scale, and loss_scale may change"
    if reason is not None:
        raise RequestError(f"reduction is {reduction}, and {reason}; leave one out")


def check_bare(chunks: Iterable[Chunk]) -> None:
    """Refuse alternating buffers for layers that are wrapped, or have experts."""
    for chunk in chunks:
        for index, layer in chunk.numbered():
            if any(units_in(layer)):
                raise RequestError(
                    f"{chunk.name_of(index)} is wrapped already, and "
                    "alternating_buffers are for layers that shard='parameters' "
                    "wraps; pass the bare layer"
                )
            if experts_in(layer):
                raise RequestError(
                    "alternating_buffers store whole layers, and experts are sharded "
                    "separately from the rest; leave alternating_buffers out"
                )


def wrap(
    layers: Iterable[nn.Module], place: Place, shard: str, tied: Set[nn.Parameter]
) -> None:
    """Shard the layers that have parameters and are not wrapped yet, as ``shard`` asks.

    Experts are sharded over the processes that have the same ones, module by module;
    where there are no others they stay whole, as ``tied`` parameters do.
    """
    if shard == "none":
        return
    from torch.distributed.fsdp import fully_shard

    assert place.mesh is not None
    mesh = shard_mesh(place.mesh)
    assert mesh is not None
    resharded = shard == "parameters"
    expert_mesh = shard_mesh(place.mesh, without=(EXPERT_DIM,))
    is_apart = expert_mesh is not None and expert_mesh.size() > 1
    for layer in dict.fromkeys(layers):
        parameters = set(layer.parameters())
        if not parameters or any(units_in(layer)):
            continue
        experts, whole = experts_in(layer), parameters & tied
        if is_apart and experts:
            for module in _modules_of(layer, experts):
                fully_shard(module, mesh=expert_mesh, reshard_after_forward=resharded)
        if parameters > experts | whole:
            ignored = whole if is_apart else experts | whole
            fully_shard(
                layer,
                mesh=mesh,
                reshard_after_forward=resharded,
                ignored_params=ignored or None,
            )


def _modules_of(layer: nn.Module, experts: Set[nn.Parameter]) -> Iterator[nn.Module]:
    """The largest modules in a layer that contain nothing but experts."""
    parameters = set(layer.parameters())
    if not parameters & experts:
        return
    if parameters <= experts:
        yield layer
        return
    for name, p in layer.named_parameters(recurse=False):
        if p in experts:
            raise RequestError(
                f"{name} of a {type(layer).__name__} is an expert's, next to other "
                "parameters, and shard= needs different processes for both; put the "
                "experts' parameters into a separate module, whose forward uses them"
            )
    for module in layer.children():
        yield from _modules_of(module, experts)
